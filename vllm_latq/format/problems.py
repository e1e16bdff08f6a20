"""How a violated invariant of a stored linear is reported."""

import torch

from vllm_latq.errors import REPAIR, CheckpointError


def problem(where: str, expected: str, found: str) -> CheckpointError:
    """Return the error for one violated invariant of the tensor `where`."""
    return CheckpointError(where, expected, found, REPAIR)


def mismatches(wrong: torch.Tensor, *axes: str) -> str:
    """Return how many elements of a mask are true, and where the first one is, in terms of the mask's axes."""
    first = torch.unravel_index(wrong.flatten().to(torch.uint8).argmax(), wrong.shape)
    place = ", ".join(f"{axis} {int(index)}" for axis, index in zip(axes, first, strict=True))
    count = int(wrong.sum())
    return f"{count} mismatch{'es' if count > 1 else ''}, the first at {place}"
