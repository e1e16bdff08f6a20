"""Errors of vllm-latq. Each says where it happened, what was expected, what was found, and what to do."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

SHOWN_CHARACTERS = 2000
# Hints that more than one place gives.
REPAIR = "The checkpoint is damaged: copy or download it again, or quantize again."
OTHER_MODEL = "config.json and the tensors are of different models."
MISSING = "The checkpoint is incomplete, or its `ignore` list does not name a layer stored unquantized."
RESTART_TO_RELOAD = "Reloading reuses the first checkpoint's buffers: restart the server with this checkpoint."
# Stands for the name of the layer in a hint, until `naming` fills it in.
LAYER = "LAYER"


def printable(text: str) -> str:
    """Return text that is safe in a terminal or a log: control characters escaped, the middle of long text cut."""
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[: SHOWN_CHARACTERS // 2]} ... {text[-SHOWN_CHARACTERS // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question that offers the known name most like a mistyped one; empty if none is like it."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f" Did you mean {found[0]}?" if found else ""


class LatqError(ValueError):
    """Base of every error this package raises on purpose.

    Args:
        where: file, tensor, layer or option concerned.
        expected: the state that would have been right.
        found: the state that was there.
        hint: the action that the user can take.
    """

    def __init__(self, where: str, expected: str, found: str, hint: str = "") -> None:
        where, expected, found = (printable(part) for part in (where, expected, found))
        # Another library's message may end with a full stop.
        found = found.rstrip(".")
        self.where, self.expected, self.found, self.hint = where, expected, found, hint
        super().__init__(f"{where}: expected {expected}, found {found}." + (f" {hint}" if hint else ""))

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        # Worker processes pickle exceptions: rebuild from the four parts, not from the joined message.
        return type(self), (self.where, self.expected, self.found, self.hint)


@contextmanager
def naming(layer: str) -> Iterator[None]:
    """Raise an error of the code inside again with the layer's name as its `where`; "" leaves errors as they are."""
    try:
        yield
    except LatqError as error:
        if not layer:
            raise
        raise type(error)(layer, error.expected, error.found, error.hint.replace(LAYER, layer)) from error


class ConfigError(LatqError):
    """A recipe, an option or a `quantization_config` that cannot be used."""


class CheckpointError(LatqError):
    """A checkpoint that is incomplete, corrupt or not of this format."""


class CalibrationError(LatqError):
    """Calibration data that is missing, unreadable or too small."""


class NumericalError(LatqError):
    """Non-finite numbers, or a Hessian that cannot be factorised."""


class UnsupportedModelError(LatqError):
    """A model whose architecture is not understood."""


class UnsupportedShapeError(LatqError):
    """A matrix shape that the chosen scheme or kernel cannot handle."""


class RankError(LatqError):
    """Another process of a shared run that hangs, or that ended."""


class UsageError(LatqError):
    """Options of the command line that do not go together.

    Args:
        sentence: which option, what is wrong with it and what to do.
    """

    def __init__(self, sentence: str) -> None:
        ValueError.__init__(self, sentence)

    def __reduce__(self) -> tuple[type, tuple[str, ...]]:
        return type(self), (str(self),)


def refusal(error: Exception, path: Path) -> str:
    """Return why `path` could not be written: without an error number, and with a path only if it is another one."""
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not path.parent.is_dir():
        return f"no such directory {path.parent}"
    if isinstance(error, OSError) and error.strerror:
        other = "" if error.filename in (None, str(path)) else f": {error.filename}"
        return f"{error.strerror.lower()}{other}"
    return str(error)


def summary(error: BaseException) -> str:
    """Return an error of another library in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
