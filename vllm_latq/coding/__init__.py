"""Integers to bits and back: packed codes, and how a matrix is cut into chunks. Imports `errors`."""
