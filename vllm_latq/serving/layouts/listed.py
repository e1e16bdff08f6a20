"""Operands whose fields are tensors, then numbers: how the operator gets them and gives them back."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch


class ListedOperands:
    """Base of dataclasses whose fields are TENSORS and CONSTANTS, in this order."""

    TENSORS: ClassVar[tuple[str, ...]]
    CONSTANTS: ClassVar[tuple[str, ...]]

    @classmethod
    def from_lists(cls, tensors: Sequence[torch.Tensor | None], constants: Sequence[int], arch: str = "") -> Self:
        """Unpack the values of `tensors()`, and `constants()`, which the operator is given."""
        fields: list[Any] = [*tensors, *constants]
        return cls(*fields)

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Return the tensors to register, by name."""
        return {name: getattr(self, name) for name in self.TENSORS}

    def constants(self) -> list[int]:
        """Return what is the same for every weight of a scheme and shape; the first is the number of rows."""
        return [int(getattr(self, name)) for name in self.CONSTANTS]
