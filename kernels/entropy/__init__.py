"""Decoders of Huffman and rANS streams on a GPU. Imports `configs`, `errors`."""
