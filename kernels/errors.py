"""The error that the kernels raise for input they cannot run."""


class KernelInputError(ValueError):
    """Weights or activations that no kernel can run.

    Args:
        where: the function or argument that is wrong.
        expected: a valid value.
        found: the value given.
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
