"""Random weights of a scheme's layout, for `--load-format dummy`: sizes and speed are real, the numbers are not."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from vllm_latq.coding.packing import packed_words
from vllm_latq.format.config import WHOLE_ROW, LayerScheme
from vllm_latq.format.csr import CSR
from vllm_latq.format.packed import PackedWeight

DEFAULT_OUTLIER_RATE, MOST_OUTLIERS = 0.01, 0.5
# The width that entropy-coded checkpoints of about 4 bits decode to.
DECODED_BITS = 4
# Small, as vLLM's own dummy weights are, so that activations stay finite.
SCALE = 1e-3


def dummy_weight(scheme: LayerScheme, rows: int, cols: int, recipe: Mapping[str, Any]) -> PackedWeight:
    """A PackedWeight [rows, cols] on the CPU with random codes and outliers at random places.

    Args:
        scheme: of the layer; an entropy-coded one gets the layout it has once decoded.
        rows: output channels.
        cols: input channels.
        recipe: its `outlier_rate` sets the number of outliers.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    bits = scheme.bits or DECODED_BITS
    limits = torch.iinfo(torch.int32)
    words = (rows, packed_words(cols, bits))
    qweight = torch.randint(limits.min, limits.max, words, generator=generator, dtype=torch.int32, device="cpu")
    decoded = scheme.encoding != "packed"
    outliers = None
    if decoded or scheme.outliers:
        rate = float(recipe.get("outlier_rate") or DEFAULT_OUTLIER_RATE)
        # Of coded weights, an integer that the codes do not quite reach, as most of them are.
        value, dtype = (2.0 ** (bits - 1), torch.float32) if decoded else (SCALE, torch.bfloat16)
        outliers = _strewn_outliers(rows, cols, rate, torch.tensor(value, dtype=dtype, device="cpu"), generator)
    return PackedWeight(
        qweight=qweight,
        bits=bits,
        group_size=WHOLE_ROW if scheme.group_size is None else scheme.group_size,
        cols=cols,
        scales=None if decoded else torch.full((rows, scheme.groups(cols)), SCALE, dtype=torch.bfloat16, device="cpu"),
        row_scales=torch.full((rows,), SCALE, dtype=torch.float32, device="cpu") if decoded else None,
        outliers=outliers,
        column_scales=torch.ones(cols, dtype=torch.float32, device="cpu") if scheme.encoding == "rans" else None,
        midrise=scheme.grid == "midrise",
    )


def _strewn_outliers(rows: int, cols: int, rate: float, value: torch.Tensor, generator: torch.Generator) -> CSR:
    """About `rate` outliers of one value [], at random places, on the CPU.

    In columns that rows share x would be quicker to gather than for trained ones, and slices would need no padding.
    """
    draws = max(1, round(-math.log1p(-min(rate, MOST_OUTLIERS)) * rows * cols))  # some places are drawn twice
    places = torch.randint(rows * cols, (draws,), generator=generator, device="cpu").unique()
    return CSR.from_sorted(places // cols, places % cols, value.expand(places.numel()).clone(), (rows, cols))
