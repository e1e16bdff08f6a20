"""Record the kernels that a product launches, instead of launching them, and the operators of torch that it calls."""

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class RecordedKernel:
    """Stands in for a Triton function: records the named arguments of each launch, and launches nothing."""

    def __init__(self) -> None:
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **named: self.launches.append(named)


class RecordedOperators(TorchDispatchMode):
    """Records the names of the operators that are called while it is active, `namespace::name`."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.add(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))
