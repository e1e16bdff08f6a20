"""FORMAT.md as code: config, tensors, validation, the reader of a checkpoint. Imports `coding`."""
