"""The trellis code: rings decode to the windows they were packed from, and matrices are cut as FORMAT.md says."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.format_reader import FACTORS as FACTORS_OF_THE_FORMAT
from helpers.trellis import random_trellis
from vllm_latq.coding.trellis.code import (
    FACTORS,
    RATES,
    STEPS,
    TILE,
    TWO_TERMS_FROM,
    WINDOWS,
    decode_rings,
    pack_rings,
    step_places,
    tile_words,
    window_values,
)
from vllm_latq.coding.trellis.decoder import decode_tiles
from vllm_latq.coding.trellis.layout import (
    LEAST_PART,
    UNIT_COLUMNS,
    UNIT_ROWS,
    column_order,
    parts,
    tile_rates,
    tiles,
    trellis_words,
    units,
)

SIZES = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500)


def random_symbols(count: int, rate: int) -> torch.Tensor:
    return torch.randint(0, 1 << rate, (count, STEPS), generator=torch.Generator().manual_seed(rate))


@pytest.mark.parametrize("rate", RATES)
def test_rings_decode_to_the_windows_of_their_symbols(rate: int) -> None:
    symbols = random_symbols(3, rate)
    words = pack_rings(symbols, rate)
    assert words.dtype == torch.int32
    assert words.shape == (3, tile_words(rate))
    found = decode_rings(words, rate)
    row, column = step_places()
    for tile, ring in zip(found, symbols.tolist(), strict=True):
        window = 0
        for symbol in ring:  # once around, so that the first windows begin with the last bits
            window = (window << rate | symbol) % WINDOWS
        for step, symbol in enumerate(ring):
            window = (window << rate | symbol) % WINDOWS
            values = tile[row[step], column[step] : column[step] + 2]
            assert torch.equal(values, window_values(rate)[window])


def test_steps_cover_a_tile_once() -> None:
    row, column = step_places()
    places = torch.cat((row * TILE + column, row * TILE + column + 1))
    assert places.sort().values.tolist() == list(range(TILE * TILE))


def test_factors_are_float32_and_those_of_the_format() -> None:
    assert FACTORS == FACTORS_OF_THE_FORMAT
    assert tuple(FACTORS) == RATES
    assert all(float(np.float32(factor)) == factor for factor in FACTORS.values())


@pytest.mark.parametrize(("rate", "deviation"), [(TWO_TERMS_FROM - 1, 104.450), (TWO_TERMS_FROM, 147.881)])
def test_values_have_the_deviation_that_factors_are_made_for(rate: int, deviation: float) -> None:
    values = window_values(rate)
    assert values.double().square().mean().sqrt().item() == pytest.approx(deviation, abs=5e-4)
    assert values.min() >= -512
    assert values.max() <= 508


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("columns", SIZES)
def test_tiles_have_the_rate_of_their_unit(rows: int, columns: int) -> None:
    high, wide = units(rows, columns)
    rates = torch.randint(RATES[0], RATES[-1] + 1, (high, wide), generator=torch.Generator().manual_seed(rows))
    rates = rates.to(torch.uint8)
    of_tiles = tile_rates(rates, rows, columns)
    assert of_tiles.shape == tiles(rows, columns)
    for (i, j), rate in np.ndenumerate(of_tiles.numpy()):
        assert rate == rates[i * TILE // UNIT_ROWS, j * TILE // UNIT_COLUMNS]
    assert trellis_words(rates, rows, columns) == sum(tile_words(rate) for rate in of_tiles.flatten().tolist())


@pytest.mark.parametrize(
    ("columns", "count"),
    [(1, 1), (255, 1), (256, 1), (511, 1), (512, 2), (576, 1), (640, 1), (768, 2), (1024, 4), (1536, 4), (2048, 8),
     (2176, 1), (4096, 8), (11008, 2), (14336, 8)],
)  # fmt: skip
def test_parts_are_whole_units(columns: int, count: int) -> None:
    assert parts(columns) == count
    if count > 1:
        assert columns % (count * UNIT_COLUMNS) == 0
        assert columns // count >= LEAST_PART


@given(columns=st.sampled_from([1, 2, 33, 256, 512, 768, 1024, 2048]), spread=st.integers(0, 127), seed=st.integers(0))
def test_order_sorts_each_part_and_keeps_ties(columns: int, spread: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    importance = torch.randint(-spread - 1, spread + 1, (columns,), generator=generator).to(torch.int8)
    order = column_order(importance)
    assert order.sort().values.tolist() == list(range(columns))
    size = columns // parts(columns)
    for low in range(0, columns, size):
        part = order[low : low + size].tolist()
        assert part == sorted(range(low, low + size), key=lambda j: (-int(importance[j]), j))


def test_extreme_importances_are_ordered() -> None:
    """int8 cannot hold minus its least number."""
    assert column_order(torch.tensor([-128, 127, 0, -128, -127], dtype=torch.int8)).tolist() == [1, 2, 4, 0, 3]


def test_tiles_are_decoded_row_by_row() -> None:
    weight = random_trellis(150, 270)
    rates = tile_rates(weight.rates, *weight.shape)
    found = decode_tiles(weight.trellis, rates)
    start = 0
    for (i, j), rate in np.ndenumerate(rates.numpy()):
        words = weight.trellis[start : start + tile_words(rate)]
        expected = decode_rings(words[None], int(rate))[0].to(torch.float32) * torch.tensor(FACTORS[rate])
        assert torch.equal(found[TILE * i : TILE * (i + 1), TILE * j : TILE * (j + 1)], expected)
        start += tile_words(rate)
    assert start == len(weight.trellis)
