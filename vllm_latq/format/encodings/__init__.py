"""One file per encoding of a weight matrix: its tensors, invariants and decoding. Imports `coding`."""
