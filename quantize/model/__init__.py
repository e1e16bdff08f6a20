"""A Hugging Face model, a block at a time: its tensors, its linears. Imports `machine`, `recipe`."""
