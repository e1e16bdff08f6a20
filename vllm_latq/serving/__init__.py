"""From a checkpoint's weight to one operator. Imports `format`, `coding`, `models`, `kernels`."""
