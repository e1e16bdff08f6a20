"""Outliers as integers: the bytes that FORMAT.md states, and every gap and overflow there and back."""

import pytest
import torch

from vllm_latq.format import integer_outliers as overflow
from vllm_latq.format.csr import CSR
from vllm_latq.format.integer_outliers import encode, entries, entries_per_outlier


def listed(z: list[list[int]], half: int) -> tuple[list[int], list[int]]:
    integers = torch.tensor(z, dtype=torch.int32)
    gaps, overflow = encode(CSR.from_mask((integers < -half) | (integers >= half), integers), half)
    assert gaps.dtype == overflow.dtype == torch.uint8
    return gaps.tolist(), overflow.tolist()


def test_example_of_the_module() -> None:
    assert listed([[1, -2, 9, 0], [3, -5, 0, 0]], 4) == ([2, 2], [5, 0])


@pytest.mark.parametrize(
    ("gap", "beyond", "gaps", "overflow"),
    [
        (0, 1, [0], [0]),
        (254, 255, [254], [254]),
        (255, 1, [255, 0], [0, 0]),
        (0, 256, [0, 0], [255, 0]),
        (256, 600, [255, 1, 0], [255, 255, 89]),
        (600, 256, [255, 255, 90], [255, 0, 0]),
    ],
)
def test_shortest_form(gap: int, beyond: int, gaps: list[int], overflow: list[int]) -> None:
    assert listed([[0] * gap + [1 + beyond]], 2) == (gaps, overflow)
    assert listed([[0] * gap + [-2 - beyond]], 2) == (gaps, overflow)


@pytest.mark.parametrize("band", [1, 7, 1 << 18])
@pytest.mark.parametrize("density", [0.0, 0.002, 0.2, 1.0])
def test_round_trip_in_bands(monkeypatch: pytest.MonkeyPatch, band: int, density: float) -> None:
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(30, 41, generator=generator) < density
    beyond = (1 / torch.rand(30, 41, generator=generator)).to(torch.int32).clamp(1, 3000)
    outliers = CSR.from_mask(mask, torch.where(torch.rand(30, 41, generator=generator) < 0.5, -4 - beyond, 3 + beyond))
    monkeypatch.setattr(overflow, "BAND_ENTRIES", band)
    monkeypatch.setattr("vllm_latq.format.csr.BAND_ENTRIES", band)
    found = torch.full((30, 41), 0, dtype=torch.int64)
    for rows, cols, numbers in entries(*encode(outliers, 4), 41):
        assert len(rows) <= band
        found[rows, cols] = numbers
    assert torch.equal(found, beyond * mask)


@pytest.mark.parametrize("rate", [0.002, 0.01, 0.1])
def test_planned_entries_are_those_of_evenly_strewn_outliers(rate: float) -> None:
    mask = torch.rand(1000, 1000, generator=torch.Generator().manual_seed(0)) < rate
    gaps, _ = encode(CSR.from_mask(mask, mask * 9), 4)
    assert len(gaps) / int(mask.sum()) == pytest.approx(entries_per_outlier(rate), rel=0.05)
