"""Kernels and launchers for routed experts. Imports `decode` and below."""
