"""How one linear is stored. FORMAT.md section 2.

Invariant: each value of an instance is one that the format knows. `encodings.registry.encoding_of` checks that the
encoding allows it, before a tensor is read or written.
"""

from dataclasses import dataclass
from typing import Any, Literal

from vllm_latq.errors import ConfigError, UnsupportedShapeError

CONFIG_KEY = "quantization_config"
SUPPORTED_BITS = (2, 3, 4, 8)
GRIDS = ("midtread", "midrise")
WHOLE_ROW = -1
# Formats of other projects that a checkpoint can be written in.
EXPORT_FORMATS = ("compressed-tensors",)
SCHEME_KEYS = ("encoding", "bits", "group_size", "outliers", "grid")

Grid = Literal["midtread", "midrise"]
# Left out where they have this value: the first readers did not know these keys.
_LATER_KEYS = {"grid": "midtread"}


@dataclass(frozen=True)
class LayerScheme:
    """The form in which one linear is stored.

    Attributes:
        encoding: "packed" (b-bit codes with group scales, optionally CSR outliers), "huffman" (integers on one
            scalar scale, entropy coded) or "trellis" (a trellis code on scales of rows and columns).
        bits: width of the codes of "packed" (2, 3, 4 or 8); None for the other encodings.
        group_size: input channels that share a scale, -1 for the whole row; None unless "packed".
        outliers: whether "packed" carries a CSR matrix of outliers.
        grid: "midtread", the multiples of the scale (for "packed" from -2^(bits-1) to 2^(bits-1) - 1), or "midrise",
            for "packed" the points half a step above them, which are symmetric around zero and exclude zero.
    """

    encoding: str
    bits: int | None = None
    group_size: int | None = None
    outliers: bool = False
    grid: Grid = "midtread"

    def __post_init__(self) -> None:
        if not isinstance(self.encoding, str):
            raise ConfigError(f"{CONFIG_KEY}.encoding", "a string", repr(self.encoding))
        if self.bits is not None and (type(self.bits) is not int or self.bits not in SUPPORTED_BITS):
            raise ConfigError(f"{CONFIG_KEY}.bits", f"one of {SUPPORTED_BITS}", repr(self.bits))
        if self.group_size is not None and (
            type(self.group_size) is not int or (self.group_size != WHOLE_ROW and self.group_size < 1)
        ):
            raise ConfigError(f"{CONFIG_KEY}.group_size", "-1 or a positive integer", repr(self.group_size))
        if type(self.outliers) is not bool:
            raise ConfigError(f"{CONFIG_KEY}.outliers", "true or false", repr(self.outliers))
        if self.grid not in GRIDS:
            raise ConfigError(f"{CONFIG_KEY}.grid", f"one of {', '.join(GRIDS)}", repr(self.grid))

    @property
    def midrise(self) -> bool:
        """True if the points of the grid lie half a step above the multiples of the scale."""
        return self.grid == "midrise"

    def code_layout(self) -> tuple[int, int]:
        """Return bits and group_size; raise ConfigError if one of them is missing."""
        if self.bits is None or self.group_size is None:
            found = f"bits={self.bits!r}, group_size={self.group_size!r}"
            raise ConfigError(CONFIG_KEY, f"bits and group_size with encoding {self.encoding!r}", found)
        return self.bits, self.group_size

    def groups(self, cols: int, where: str = "layer") -> int:
        """Return the number of scale groups in a row of `cols` input channels; raise if they do not divide the row."""
        _, group_size = self.code_layout()
        if group_size == WHOLE_ROW:
            return 1
        if cols % group_size:
            raise UnsupportedShapeError(
                where,
                f"input channels divisible by group_size={group_size}",
                f"{cols} input channels",
                f"Choose a group size that divides them{_smaller(cols, group_size)}, or -1 for one scale per row.",
            )
        return cols // group_size

    def to_dict(self) -> dict[str, Any]:
        """Return the scheme as JSON values."""
        values = {key: getattr(self, key) for key in SCHEME_KEYS}
        return {key: value for key, value in values.items() if value is not None and value != _LATER_KEYS.get(key)}


def _smaller(cols: int, group_size: int) -> str:
    """Return the usual group sizes below `group_size` that divide a row, in words."""
    found = [str(size) for size in (512, 256, 128, 64, 32, 16) if size < group_size and cols % size == 0]
    return f", such as {' or '.join(found[:2])}" if found else ""


def grid_name(midrise: bool) -> Grid:
    """Return the name of a grid."""
    return "midrise" if midrise else "midtread"
