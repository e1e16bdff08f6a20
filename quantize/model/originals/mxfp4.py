"""MXFP4 (`quant_method: mxfp4`), as gpt-oss stores its experts.

    experts.down_proj_blocks uint8 [experts, rows, columns / 32, 16],
    experts.down_proj_scales uint8 [experts, rows, columns / 32]       ->  experts.down_proj [experts, columns, rows]

transformers' module holds the matrices transposed, and so the tensors are shown.
"""

import torch

from vllm_latq.quantize.model.originals.float4 import BLOCK, Float4
from vllm_latq.quantize.model.originals.published import Found, Published

BLOCKS, SCALES = "_blocks", "_scales"


def find(published: Published) -> Found:
    """Find the experts.

    Raises:
        UnsupportedModelError: blocks or scales of another shape or dtype, or no scales.
    """
    found = Found()
    for blocks in published.headers:
        if blocks.endswith(BLOCKS):
            stem = blocks.removesuffix(BLOCKS)
            found.packed[stem] = _experts(published, blocks, f"{stem}{SCALES}")
    return found


def _experts(published: Published, blocks: str, scales: str) -> Float4:
    """Return how the experts of one layer are stored, after a check of the shapes."""
    expected = f"bytes, shape (experts, rows, blocks, {BLOCK // 2})"
    published.require(
        blocks,
        blocks,
        expected,
        lambda it: it.dtype == torch.uint8 and len(it.shape) == 4 and it.shape[-1] == BLOCK // 2,
    )
    grid = count, rows, groups = published.headers[blocks].shape[:-1]
    published.require(scales, blocks, f"bytes, shape {grid}", lambda it: it == (torch.uint8, grid))
    return Float4(published.where(scales), (blocks, scales), (count, groups * BLOCK, rows), transposed=True)
