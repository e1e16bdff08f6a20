"""The decoder of Huffman streams on a GPU. Imports `configs`, `errors`."""
