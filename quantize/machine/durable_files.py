"""Files that appear complete or not at all, and errors that say which directory failed."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from vllm_latq.errors import CheckpointError, refusal

KEPT = "Finished blocks are kept: make room or restore the permission, then go on with --resume."


@contextmanager
def named_failures(directory: Path, hint: str = KEPT) -> Iterator[None]:
    """A full disk or a missing permission, as an error that says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        found = refusal(error, directory)
        raise CheckpointError(str(directory), "a directory that can be written to", found, hint) from error


@contextmanager
def appearing(path: Path, hint: str = "Choose another file, or make room.") -> Iterator[Path]:
    """Yield an empty file beside `path`, which becomes `path` at the end; after a failure there is no file.

    Raises:
        CheckpointError: the file cannot be created, which is known before hours of work, or be renamed.
    """
    temporary = path.parent / f"{path.name}.tmp"
    with named_failures(path, hint):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary.unlink(missing_ok=True)  # nothing is written through a link
        temporary.touch()
    try:
        yield temporary
        with named_failures(path, hint):
            rename_durably(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def rename_durably(old: Path, new: Path) -> None:
    """Rename after the contents reached the disk, then make the rename itself durable."""
    sync(old)
    os.replace(old, new)
    sync(new.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
