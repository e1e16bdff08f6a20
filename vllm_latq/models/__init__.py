"""Surgery on transformers' models: experts stored as one tensor, names of tensors. Imports `errors`."""
