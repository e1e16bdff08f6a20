"""Memory and memory bandwidth of known GPUs, for the decoding speed that bandwidth allows."""

from typing import NamedTuple

GIB = 1 << 30
# Part of the memory that vLLM takes by default up to 0.31; 0.32 takes 0.92.
GPU_UTILIZATION = 0.9


class Gpu(NamedTuple):
    """A GPU, with the numbers that its maker publishes.

    Attributes:
        name: without the maker.
        gib: memory, as the maker writes it, in GB; a GPU of 24 GB has 24 GiB or a little less.
        bandwidth: of the memory, in GB (1e9 bytes) per second.
    """

    name: str
    gib: int
    bandwidth: int


# From the product pages and data sheets of NVIDIA, 2020 to 2026: "Memory" and "Memory bandwidth" of each card.
GPUS = (
    Gpu("L4", 24, 300),
    Gpu("A10", 24, 600),
    Gpu("RTX 3090", 24, 936),
    Gpu("RTX 4090", 24, 1008),
    Gpu("RTX 5090", 32, 1792),
    Gpu("A100 40 GB", 40, 1555),
    Gpu("RTX A6000", 48, 768),
    Gpu("L40S", 48, 864),
    Gpu("RTX 6000 Ada", 48, 960),
    Gpu("A100 80 GB SXM", 80, 2039),
    Gpu("H100 SXM", 80, 3350),
    Gpu("RTX PRO 6000", 96, 1792),
    Gpu("DGX Spark (GB10)", 128, 273),
    Gpu("H200", 141, 4800),
    Gpu("B200", 180, 8000),
)
