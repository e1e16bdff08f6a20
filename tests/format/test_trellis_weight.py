"""A trellis in memory: it dequantizes what it stores, and is written as it was read."""

import pytest
import torch

from helpers.trellis import TRELLIS, greedy_trellis, random_trellis
from vllm_latq.coding.trellis.code import FACTORS
from vllm_latq.errors import ConfigError
from vllm_latq.format.encodings.octaves import octave_eighths
from vllm_latq.format.encodings.registry import encoding_of
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.validate import weight_from_tensors


@pytest.mark.parametrize("shape", [(1, 1), (3, 33), (70, 140), (17, 1024)], ids=str)
def test_tensors_round_trip(shape: tuple[int, int]) -> None:
    weight = random_trellis(*shape)
    tensors = weight.to_tensors()
    again = weight_from_tensors(tensors, TRELLIS, shape, "layer")
    assert isinstance(again, TrellisWeight)
    assert again.shape == weight.shape == shape
    assert again.scheme == weight.scheme == TRELLIS
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert all(torch.equal(tensor, tensors[suffix]) for suffix, tensor in again.to_tensors().items())
    assert weight.storage_bits() == weight.served_bits() == sum(8 * tensor.nbytes for tensor in tensors.values())


def test_outliers_are_the_kept_weights() -> None:
    weight = random_trellis(30, 50, kept=0.1)
    kept = torch.zeros(30 * 50, dtype=torch.int64)
    kept[weight.kept_positions.to(torch.int64)] = 1
    assert torch.equal(weight.outlier_counts(), kept.view(30, 50).sum(1))
    assert weight.outlier_density() == int(kept.sum()) / 1500
    assert random_trellis(30, 50, kept=0.0).outlier_density() == 0


def test_weights_are_rounded_once_to_the_dtype() -> None:
    weight = random_trellis(30, 50, kept=0.1)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(weight.dequantize(dtype), weight.dequantize().to(dtype))


def test_hosts_defaults_do_not_matter() -> None:
    """A server loads weights with the dtype of its model as torch's default."""
    weight = random_trellis(30, 50, kept=0.1)
    expected = weight.dequantize()
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = weight.dequantize()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_exponents_scale_rows_and_columns_by_powers_of_two() -> None:
    """Whole octaves are exact, and do not change the rest of the weight."""
    weight = random_trellis(20, 30, kept=0.0)
    parts = weight.encoded()
    raised = TrellisWeight(**parts | {name: parts[name] + 8 for name in ("row_exponents", "column_exponents")})
    assert torch.equal(raised.dequantize(), 4 * weight.dequantize())


def test_greedy_weights_are_close() -> None:
    wanted = torch.randn(50, 70, generator=torch.Generator().manual_seed(0))
    found = greedy_trellis(wanted)
    assert (found.dequantize() - wanted).square().mean() < 0.06
    assert found.outlier_density() < 0.02
    assert set(found.rates.flatten().tolist()) <= FACTORS.keys()


def test_factors_are_exact_powers_rounded_once() -> None:
    factors = octave_eighths(torch.tensor([-128, -8, 0, 1, 8, 127], dtype=torch.int8))
    assert factors.tolist()[:3] == [2.0**-16, 0.5, 1.0]
    assert factors[4] == 2.0
    assert factors[3] == torch.tensor(2.0**0.125, dtype=torch.float32)
    assert factors[5] == torch.tensor(2.0**15.875, dtype=torch.float32)


@pytest.mark.parametrize(
    "scheme",
    [
        LayerScheme("trellis", bits=4),
        LayerScheme("trellis", group_size=32),
        LayerScheme("trellis", outliers=True),
        LayerScheme("trellis", grid="midrise"),
    ],
    ids=str,
)
def test_scheme_has_nothing_but_the_encoding(scheme: LayerScheme) -> None:
    with pytest.raises(ConfigError, match="no bits, group_size, outliers or grid with encoding 'trellis'"):
        encoding_of(scheme)
