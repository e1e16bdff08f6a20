"""Random weights of a scheme, for `--load-format dummy`: sizes and speed are real, the numbers are not."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from vllm_latq.coding.packing import packed_words
from vllm_latq.coding.trellis.code import RATES, tile_words
from vllm_latq.coding.trellis.layout import tile_rates, units
from vllm_latq.format.csr import CSR
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.registry import encoding_of
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.format.scheme import WHOLE_ROW, LayerScheme
from vllm_latq.serving.merging import Merged
from vllm_latq.serving.trellis import MergedTrellis

DEFAULT_OUTLIER_RATE, MOST_OUTLIERS = 0.01, 0.5
# Width of the codes that entropy-coded checkpoints of about 4 bits are decoded to.
DECODED_BITS = 4
# Small, as vLLM's own dummy weights are, so that activations stay finite.
SCALE = 1e-3
# Bits of trellis weights if the recipe names none, and the share of them that is kept exactly.
TRELLIS_BITS, KEPT_RATE = 3.0, 1e-4


def dummy_weight(scheme: LayerScheme, rows: int, cols: int, recipe: Mapping[str, Any]) -> Merged:
    """Return a weight [rows, cols] on the CPU with random codes, and outliers or kept weights at random places.

    Args:
        scheme: scheme of the layer; for an entropy-coded one the weight has the layout of decoded integers.
        rows: output channels.
        cols: input channels.
        recipe: its `outlier_rate` sets the number of outliers, its `bits` the rate of a trellis code.
    """
    if encoding_of(scheme) is TrellisWeight:
        return MergedTrellis.of([_dummy_trellis(rows, cols, recipe)])
    return _dummy_packed(scheme, rows, cols, recipe)


def _dummy_trellis(rows: int, cols: int, recipe: Mapping[str, Any]) -> TrellisWeight:
    generator = torch.Generator(device="cpu").manual_seed(0)
    rate = min(max(round(2 * float(recipe.get("bits") or TRELLIS_BITS)), RATES[0]), RATES[-1])
    rates = torch.full(units(rows, cols), rate, dtype=torch.uint8, device="cpu")
    words = int(tile_rates(rates, rows, cols).sum()) * tile_words(1)
    limits = torch.iinfo(torch.int32)
    draws = max(1, round(KEPT_RATE * rows * cols))
    kept = torch.randint(rows * cols, (draws,), generator=generator, device="cpu").unique()
    flat = [torch.zeros(size, dtype=torch.int8, device="cpu") for size in (rows, cols, cols)]
    return TrellisWeight(
        scale=_filled(1, value=SCALE),
        row_exponents=flat[0],
        column_exponents=flat[1],
        column_importance=flat[2],
        rates=rates,
        trellis=torch.randint(limits.min, limits.max, (words,), generator=generator, dtype=torch.int32, device="cpu"),
        kept_positions=kept.to(torch.int32),
        kept_values=_filled(len(kept), value=SCALE, dtype=torch.bfloat16),
    )


def _dummy_packed(scheme: LayerScheme, rows: int, cols: int, recipe: Mapping[str, Any]) -> PackedWeight:
    generator = torch.Generator(device="cpu").manual_seed(0)
    bits = scheme.bits or DECODED_BITS
    limits = torch.iinfo(torch.int32)
    words = (rows, packed_words(cols, bits))
    qweight = torch.randint(limits.min, limits.max, words, generator=generator, dtype=torch.int32, device="cpu")
    encoding = encoding_of(scheme)
    outliers = None
    if encoding.coded or scheme.outliers:
        rate = float(recipe.get("outlier_rate") or DEFAULT_OUTLIER_RATE)
        # Most outliers of a coded weight are the first integer above the range of the codes.
        value, dtype = (2.0 ** (bits - 1), torch.float32) if encoding.coded else (SCALE, torch.bfloat16)
        outliers = _random_outliers(rows, cols, rate, torch.tensor(value, dtype=dtype, device="cpu"), generator)
    return PackedWeight(
        qweight=qweight,
        bits=bits,
        group_size=WHOLE_ROW if scheme.group_size is None else scheme.group_size,
        cols=cols,
        scales=None if encoding.coded else _filled(rows, scheme.groups(cols), value=SCALE, dtype=torch.bfloat16),
        row_scales=_filled(rows, value=SCALE) if encoding.coded else None,
        outliers=outliers,
        midrise=scheme.midrise,
    )


def _filled(*shape: int, value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of one value on the CPU, whatever torch's default device is."""
    return torch.full(shape, value, dtype=dtype, device="cpu")


def _random_outliers(rows: int, cols: int, rate: float, value: torch.Tensor, generator: torch.Generator) -> CSR:
    """Return about `rate` * rows * cols outliers of one value [] at random places, on the CPU.

    Rows with outliers in the same columns would gather x faster than trained weights do, and need no padding.
    """
    draws = max(1, round(-math.log1p(-min(rate, MOST_OUTLIERS)) * rows * cols))  # some places are drawn twice
    places = torch.randint(rows * cols, (draws,), generator=generator, device="cpu").unique()
    return CSR.from_sorted(places // cols, places % cols, value.expand(places.numel()).clone(), (rows, cols))
