"""The benchmark, its peers, the tuner and the roofline. Imports all kernels."""
