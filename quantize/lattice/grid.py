"""The grid of a lattice: which multiples of a scale a weight may be rounded to."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """The points scale * (z + offset) for integers low <= z <= high; by default all multiples of the scale.

    Attributes:
        low, high: smallest and largest integer, both finite or both infinite.
        offset: in steps; 0 (mid-tread) or 1/2 (mid-rise).
    """

    low: float = -math.inf
    high: float = math.inf
    offset: float = 0.0

    @classmethod
    def of_bits(cls, bits: int, offset: float = 0.0) -> "Grid":
        """Return the grid of b-bit integers, -2^(b-1) .. 2^(b-1) - 1."""
        return cls(-(1 << (bits - 1)), (1 << (bits - 1)) - 1, offset)

    @property
    def bounded(self) -> bool:
        """True if the grid ends, so that a weight can lie beyond it."""
        return self.high < math.inf

    @property
    def bits(self) -> int:
        """Width of the integers of a bounded grid."""
        return (int(self.high) - int(self.low)).bit_length()


UNBOUNDED = Grid()
