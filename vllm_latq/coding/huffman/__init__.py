"""The Huffman code of hptq and hrtn. Imports `coding`."""
