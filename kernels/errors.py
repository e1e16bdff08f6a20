"""The one error the kernels raise on purpose."""


class KernelInputError(ValueError):
    """Weights or activations that no kernel here can run.

    Args:
        where: function or argument concerned.
        expected: what would have been right.
        found: what was there.
        hint: what the caller can do about it.
    """

    def __init__(self, where: str, expected: str, found: str, hint: str = "") -> None:
        self.where, self.expected, self.found, self.hint = where, expected, found, hint
        super().__init__(f"{where}: expected {expected}, found {found}." + (f" {hint}" if hint else ""))

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        return type(self), (self.where, self.expected, self.found, self.hint)


def require(condition: bool, where: str, expected: str, found: object, hint: str = "") -> None:
    """Raise KernelInputError unless `condition` holds."""
    if not condition:
        raise KernelInputError(where, expected, str(found), hint)
