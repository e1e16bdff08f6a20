"""Kernels and launchers that multiply by one matrix. Imports `device`, `layout`, `configs`."""
