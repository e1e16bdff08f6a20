"""Functions that run inside a kernel (`@triton.jit`). Imports `layout`."""
