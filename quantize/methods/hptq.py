"""HPTQ and HRTN: one scale for the matrix, unbounded integers, Huffman-coded to a target of stored bits.

ICLR 2026 version of "GPTQ as Babai", section 5, Algorithms 11 and 12.

Invariant: bits are counted on the encoded matrix and everything stored beside it; they are not an entropy.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from vllm_latq.coding.huffman.encoder import encoded_bits
from vllm_latq.errors import NumericalError
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.tensors import SHAPE
from vllm_latq.quantize.lattice.factor import Factor
from vllm_latq.quantize.lattice.nearest_plane import Plane, Rounding, nearest_plane
from vllm_latq.quantize.lattice.reduction import Reduction
from vllm_latq.quantize.lattice.search import Guess, sample_rows, search_target

BITS_TOLERANCE = 0.005
MAX_PROBES = 20
# The scale is searched in (max|W| / 2^15, 2 max|W|]: at the upper end nearly every integer is 0, at the lower end they
# need 16 bits.
FINEST_OCTAVES = 15.0
# Exponents of the scales that are searched: normal numbers of float32, whose reciprocals are finite, too.
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -126.0, 127.0
# Differential entropy of a Gaussian of standard deviation 1, in bits: the bits per weight at scale 1.
GAUSSIAN_BITS = 0.5 * math.log2(2 * math.pi * math.e)
# Bits lost per doubling of the scale (measured on trained weights: 0.95 at 3 to 4 bits, 0.8 at 2).
USUAL_SLOPE = -0.95


@dataclass(frozen=True)
class HPTQResult:
    """Result of the search for a scale.

    Attributes:
        integers: int32 [r, c].
        scale: float32 scalar tensor.
        bits: stored bits per weight.
        rounding: of the final pass; None for HRTN.
        passes: quantizations of the whole matrix that the search took.
        note: empty, or why the bits are not within 0.005 of the target.
    """

    integers: torch.Tensor
    scale: torch.Tensor
    bits: float
    rounding: Rounding | None
    passes: int
    note: str


def hptq(
    weight: torch.Tensor,
    factor: Factor,
    bits: float,
    plane: Plane = nearest_plane,
    reduction: Reduction | None = None,
) -> HPTQResult:
    """Round by unclipped nearest plane with the finest scale whose encoded bits lie in [target - 0.005, target].

    Args:
        weight: float32 or float64 [r, c].
        factor: of the layer's Hessian.
        bits: stored bits per weight, everything counted; above 1, the least that a Huffman code needs.
        plane: to round with; stochastic rounding draws the same at every probe.
        reduction: a reduced basis of the lattice to round on (see reduction.py); None rounds on the original basis.

    Raises:
        NumericalError: not even the coarsest scale meets the target, or weights are too large for a float32 scale.
    """

    def quantize(part: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, Rounding]:
        if reduction is not None:
            rounding = reduction.nearest_plane(part, scale, plane)
        else:
            rounding = plane(part, factor, scale)
        return rounding.z, rounding

    return _search(weight, bits, quantize)


def hrtn(weight: torch.Tensor, bits: float) -> HPTQResult:
    """Search for the scale as `hptq` does, with plain rounding: the baseline that knows no Hessian."""
    return _search(weight, bits, lambda part, scale: ((part / scale).round().to(torch.int32), None))


def _search(
    weight: torch.Tensor,
    bits: float,
    quantize: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, Rounding | None]],
) -> HPTQResult:
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    overhead = _overhead_bits(weight)

    def probe(part: torch.Tensor, octaves: float) -> tuple[float, tuple[torch.Tensor, torch.Tensor, Rounding | None]]:
        # Rounded to float32 first: the stored scale is the scale that was used.
        scale = torch.tensor(2.0**octaves, dtype=torch.float32, device=weight.device)
        integers, rounding = quantize(part, scale)
        # A sample carries its share of the bits that are stored once.
        stored = encoded_bits(integers) + overhead * part.numel() / max(weight.numel(), 1)
        return stored / max(part.numel(), 1), (integers, scale, rounding)

    # A zero matrix has integers 0 at any scale.
    top = math.log2(largest) if largest else 0.0
    if top > _LARGEST_EXPONENT:
        raise NumericalError("weight", "weights below 2^127", f"weights up to {largest:g}", "Is the model damaged?")
    # In units of the largest weight, so that no square overflows or vanishes.
    deviation = float((weight.to(torch.float64) / largest).square().mean().sqrt()) if largest else 1.0
    start = top + math.log2(deviation) + GAUSSIAN_BITS - bits
    lower, upper = (min(max(end, _SMALLEST_EXPONENT), _LARGEST_EXPONENT) for end in (top - FINEST_OCTAVES, top + 1))
    guess = Guess(start, USUAL_SLOPE, lower, upper)
    max_probes = MAX_PROBES if largest else 1
    search = partial(search_target, target=bits, tolerance=BITS_TOLERANCE, max_probes=max_probes)
    rows = sample_rows(weight)
    if rows is not None:
        guess = guess.after(search(partial(probe, weight[rows]), guess=guess))
    found = search(partial(probe, weight), guess=guess)
    met = found.best.value
    if not found.feasible:
        raise NumericalError(
            "bits",
            f"a Huffman code of at most {bits:g} bits per weight",
            f"{met:.4f} at a scale of {2.0**found.best.x:g}, the fewest found",
            "Codes take at least 1 bit, tables and offsets come on top: raise bits, or ignore this layer.",
        )
    integers, scale, rounding = found.best.payload
    note = "" if found.met else f"{met:.4f} bits per weight, the nearest found to {bits:g}"
    return HPTQResult(integers, scale, met, rounding, found.probes, note)


def _overhead_bits(weight: torch.Tensor) -> float:
    """Return the bits of scale and shape, which are stored beside all that `encoded_bits` counts."""
    specs = tensor_specs(LayerScheme("huffman"), *weight.shape)
    return specs["scale"].bits() + specs[SHAPE].bits()
