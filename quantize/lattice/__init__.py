"""Functions of tensors: factor, round, search, measure. No file, no model, no recipe."""
