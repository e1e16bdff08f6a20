"""Processes, memory and disk of the machine; knows no model and no lattice. Imports `errors`, `format`."""
