"""The encoding `trellis`: a trellis code on scales of rows and columns, and kept weights. FORMAT.md section 3.4."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch

from vllm_latq.coding.trellis.code import RATES, TILE, tile_words
from vllm_latq.coding.trellis.decoder import decode_tiles
from vllm_latq.coding.trellis.layout import column_order, tile_rates, trellis_words, units
from vllm_latq.errors import CheckpointError, ConfigError, UnsupportedShapeError
from vllm_latq.format.encodings.octaves import octave_eighths, scale_problem
from vllm_latq.format.encodings.weight import Weight
from vllm_latq.format.problems import mismatches, problem
from vllm_latq.format.scheme import CONFIG_KEY, LayerScheme
from vllm_latq.format.tensors import TensorSpec

# Weights decoded at a time; the temporaries take some 40 bytes each.
BAND_WEIGHTS = 1 << 20
# Positions of kept weights are int32.
MOST_WEIGHTS = 1 << 31
# With less added to it, no weight is infinite in float32 or bfloat16.
KEPT_LIMIT = 2.0**127


@dataclass(frozen=True)
class TrellisWeight(Weight):
    """W[i, j] = scale * 2^(row_exponents[i] / 8) * 2^(column_exponents[j] / 8) * decoded[i, j] + kept[i, j].

    Attributes:
        scale: float32 [1].
        row_exponents: int8 [rows], eighths of an octave.
        column_exponents: int8 [cols], eighths of an octave.
        column_importance: int8 [cols]; columns are stored in its order, see `column_order`.
        rates: uint8 [row units, column units], bits per step of two weights.
        trellis: int32 [words], the rings of the tiles.
        kept_positions: int32 [kept], i * cols + j of the weights to which something is added, rising.
        kept_values: bfloat16 [kept], what is added.
    """

    full_scheme = LayerScheme("trellis")

    scale: torch.Tensor
    row_exponents: torch.Tensor
    column_exponents: torch.Tensor
    column_importance: torch.Tensor
    rates: torch.Tensor
    trellis: torch.Tensor
    kept_positions: torch.Tensor
    kept_values: torch.Tensor

    @classmethod
    def check_scheme(cls, scheme: LayerScheme) -> None:
        """Raise ConfigError for bits, a group size, outliers or a mid-rise grid, which the encoding does not have."""
        if scheme != cls.full_scheme:
            found = ", ".join(f"{key}={value!r}" for key, value in scheme.to_dict().items())
            raise ConfigError(CONFIG_KEY, "no bits, group_size, outliers or grid with encoding 'trellis'", found)

    @staticmethod
    def specs(scheme: LayerScheme, rows: int, cols: int, where: str) -> dict[str, TensorSpec]:
        """Return suffix -> spec of every stored tensor except the shape; raise if positions of weights exceed int32."""
        if rows * cols > MOST_WEIGHTS:
            hint = "Leave this linear out, or store it under another encoding."
            raise UnsupportedShapeError(where, f"at most {MOST_WEIGHTS} weights", f"{rows} x {cols}", hint)
        return {
            "scale": TensorSpec(torch.float32, (1,)),
            "row_exponents": TensorSpec(torch.int8, (rows,)),
            "column_exponents": TensorSpec(torch.int8, (cols,)),
            "column_importance": TensorSpec(torch.int8, (cols,)),
            "rates": TensorSpec(torch.uint8, units(rows, cols)),
            "trellis": TensorSpec(torch.int32, (None,)),
            "kept_positions": TensorSpec(torch.int32, (None,)),
            "kept_values": TensorSpec(torch.bfloat16, (None,)),
        }

    @staticmethod
    def problems(
        tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
    ) -> Iterator[CheckpointError]:
        """Yield one error per violated invariant of tensors whose dtypes and shapes match `specs`."""
        yield from scale_problem(tensors, where)
        rates = tensors["rates"]
        if int(rates.min()) < RATES[0] or int(rates.max()) > RATES[-1]:
            found = f"{int(rates.min())} to {int(rates.max())}"
            yield problem(f"{where}.rates", f"rates of {RATES[0]} to {RATES[-1]} bits per step", found)
            return
        words = trellis_words(rates, *shape)
        if tensors["trellis"].numel() != words:
            found = str(tensors["trellis"].numel())
            yield problem(f"{where}.trellis", f"{words} words, which its rates take", found)
        yield from _kept_problems(tensors, shape, where)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int]) -> Self:
        """Wrap validated tensors (suffix -> tensor) without decoding them."""
        return cls(**{name: tensors[name] for name in cls.specs(scheme, *shape, "")})

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        return len(self.row_exponents), len(self.column_exponents)

    @property
    def scheme(self) -> LayerScheme:
        """The scheme under which the weight is stored."""
        return self.full_scheme

    @cached_property
    def row_scales(self) -> torch.Tensor:
        """The scale times the factor of each row, rounded to float32, [rows] on the CPU."""
        return self.scale.cpu() * octave_eighths(self.row_exponents)

    @cached_property
    def column_scales(self) -> torch.Tensor:
        """The factor of each column, float32 [cols] on the CPU."""
        return octave_eighths(self.column_exponents)

    @property
    def order(self) -> torch.Tensor:
        """The columns in the order in which they are stored, int64 [cols]."""
        return column_order(self.column_importance)

    def encoded(self) -> dict[str, torch.Tensor]:
        """Return suffix -> tensor of every stored tensor except the shape."""
        return {name: getattr(self, name) for name in self.specs(self.scheme, *self.shape, "")}

    def to(self, device: torch.device) -> "TrellisWeight":
        """Return the weight with all its tensors on `device`."""
        return replace(self, **{name: tensor.to(device) for name, tensor in self.encoded().items()})

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return W [rows, cols], (decoded * row scale) * column scale + kept in float32, rounded once to `dtype`.

        Whole row tiles of about BAND_WEIGHTS weights are decoded at a time, so that temporaries stay small.
        """
        rows, cols = self.shape
        device = self.trellis.device
        rates, order = tile_rates(self.rates.cpu(), rows, cols), self.order.to(device)
        row_scales, column_scales = self.row_scales.to(device), self.column_scales.to(device)
        positions, values = self.kept_positions.to(torch.int64), self.kept_values.to(torch.float32)
        weight = torch.empty(rows, cols, dtype=dtype, device=device)
        tiles_at_a_time = max(1, BAND_WEIGHTS // (TILE * cols))
        word = 0
        for first, band_rates in enumerate(rates.split(tiles_at_a_time)):
            low = first * tiles_at_a_time * TILE
            high = min(low + len(band_rates) * TILE, rows)
            words = int(band_rates.sum()) * tile_words(1)
            band = torch.empty(high - low, cols, dtype=torch.float32, device=device)
            band[:, order] = decode_tiles(self.trellis[word : word + words], band_rates)[: high - low, :cols]
            band.mul_(row_scales[low:high, None]).mul_(column_scales)
            kept = (positions >= low * cols) & (positions < high * cols)
            band.view(-1)[positions[kept] - low * cols] += values[kept]
            weight[low:high] = band
            word += words
        return weight

    def served_bits(self) -> int:
        """Return the bits in memory while the weight is served, which are the stored ones."""
        return self.storage_bits()

    def outlier_counts(self) -> torch.Tensor:
        """Return the number of kept weights in each row, int64 [rows]."""
        rows, cols = self.shape
        return torch.bincount(self.kept_positions.to(torch.int64) // cols, minlength=rows)


def _kept_problems(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], where: str
) -> Iterator[CheckpointError]:
    """Check positions and values of the kept weights."""
    positions, values = tensors["kept_positions"], tensors["kept_values"]
    if positions.numel() != values.numel():
        yield problem(f"{where}.kept_values", f"{positions.numel()} values, one per position", str(values.numel()))
    if positions.numel():
        lowest, highest, weights = int(positions.min()), int(positions.max()), shape[0] * shape[1]
        if lowest < 0 or highest >= weights:
            yield problem(f"{where}.kept_positions", f"positions in [0, {weights})", f"{lowest} to {highest}")
        falls = torch.nn.functional.pad(positions[1:] <= positions[:-1], (1, 0))
        if falls.any():
            yield problem(f"{where}.kept_positions", "positions that rise strictly", mismatches(falls, "entry"))
    beyond = ~(values.abs() < KEPT_LIMIT)
    if beyond.any():
        yield problem(f"{where}.kept_values", f"magnitudes below {KEPT_LIMIT:g}", mismatches(beyond, "entry"))
