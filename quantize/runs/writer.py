"""Writes a checkpoint block by block, so that an interrupted run leaves nothing that loads and loses nothing.

Everything goes to `OUT.partial`. A finished block is one safetensors shard and one small JSON of its records, each
renamed into place after it was written. `finish` adds the index, the report, the model card, the companion files and,
last, config.json. It checks that transformers loads configuration and tokenizer, and renames the directory to `OUT`. A
later run may adopt the finished blocks of `OUT.partial`.

Invariant: one process at a time works in `OUT.partial`, the one that holds the lock on its LOCK_FILE.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.files import INDEX_FILE, read_json
from vllm_latq.format.reader import REPORT_FILE, config_digest, file_digests, fingerprint_of, tensor_digest
from vllm_latq.format.verify import verify
from vllm_latq.quantize.machine.durable_files import KEPT, named_failures, rename_durably, sync
from vllm_latq.quantize.model.companion_files import (
    LOCK_FILE,
    RUN_FILES,
    SCRATCH,
    STATE_FILE,
    UNFINISHED,
    copy_companions,
)
from vllm_latq.quantize.model.loading import require_loadable
from vllm_latq.quantize.model.meta_model import model_config

CHOOSE = "Choose another directory, or restore the permission."
# Directories that this process holds the lock of -> its descriptor. The system would give it to the process twice, and
# takes it back when any descriptor of the file is closed.
_held: dict[str, int] = {}


def partial_of(destination: Path) -> Path:
    """Where an unfinished run keeps its blocks."""
    return destination.with_name(destination.name + ".partial")


def free_destination(destination: str | Path, resume: bool) -> Path:
    """Where to create a checkpoint; raises CheckpointError if something is there, or an interrupted run that stays."""
    given = Path(destination)
    if given.name in ("", ".."):
        raise CheckpointError(str(given), "a name to create a directory by", "none", "Choose another directory.")
    with named_failures(given, CHOOSE):
        # A directory cannot be renamed to a link: it becomes what the link points to.
        free = Path(os.path.realpath(given)) if given.is_symlink() else given
        found = "a link that leads nowhere" if free.is_symlink() else "a file" if free.is_file() else ""
        if not found and free.exists() and any(free.iterdir()):
            found = "one that holds files"
        if found:
            hint = "Choose another directory, or remove what is there."
            raise CheckpointError(str(destination), "a new or empty directory", found, hint)
        partial = partial_of(free)
        if (partial / LOCK_FILE).exists():
            _lock(partial)
            _unlock(partial)
        if not resume and _left(partial):
            hint = "Go on with --resume and the same options, or remove it to start over."
            raise CheckpointError(str(partial), "no partial run", "an interrupted one", hint)
        return free


def _left(partial: Path) -> list[str]:
    """Files of an earlier run, or any others, without those of a run that finished nothing."""
    if partial.exists() and not partial.is_dir():
        return ["a file"]
    own = (STATE_FILE, LOCK_FILE, *UNFINISHED) if (partial / STATE_FILE).exists() else (LOCK_FILE, f"{STATE_FILE}.tmp")
    return sorted(path.name for path in partial.glob("*") if not any(fnmatch(path.name, name) for name in own))


def _lock(partial: Path) -> None:
    """Lock a directory until `_unlock`, or until the process ends; nothing where a file system has no locks.

    Raises:
        CheckpointError: another run has locked it, of this process or another.
    """
    hint = "Wait until it ends, or choose another directory."
    held = CheckpointError(str(partial), "no other run at work in it", "one", hint)
    if (key := os.path.realpath(partial)) in _held:
        raise held
    descriptor = os.open(partial / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        raise held from None
    except OSError:
        pass
    _held[key] = descriptor


def _unlock(partial: Path) -> None:
    """Give up the lock, where this process has it."""
    if (descriptor := _held.pop(os.path.realpath(partial), None)) is not None:
        os.close(descriptor)


class CheckpointWriter:
    """One checkpoint in the making. `close` lets another process go on with it.

    Args:
        destination: directory to create; must not exist or be empty.
        shards: number of shards that will be added.
        identity: whatever must be equal for a partial run to be resumed: recipe, source, versions; plain JSON.
        resume: adopt the finished shards of an interrupted run of the same identity.

    Attributes:
        complete: the interrupted run got as far as `seal`, which is all that is left to do.
        run: digest of the identity, for the report.
    """

    def __init__(self, destination: str | Path, shards: int, identity: Mapping[str, Any], resume: bool = False) -> None:
        self.destination = free_destination(destination, resume)
        self.shards = shards
        self.partial = partial_of(self.destination)
        self.run = _digest(identity)
        state = {"shards": shards, "identity": json.loads(json.dumps(identity))}
        with named_failures(self.partial, KEPT if self.partial.exists() else CHOOSE):
            # config.json comes last: a run killed after it has only to be moved, and may have lost its state already.
            self.complete = (self.partial / "config.json").exists()
            if self.complete and not (self.partial / STATE_FILE).exists():
                self._check_finished()
            elif not (self.partial / STATE_FILE).exists():
                # No state, no finished block: a run may be killed right after it made the directory.
                self._check_unused()
                self.partial.mkdir(parents=True, exist_ok=True)
            _lock(self.partial)
            try:
                if not _left(self.partial):
                    self._write_json(STATE_FILE, state)
                elif (self.partial / STATE_FILE).exists():
                    self._check_same(state)
                self._remove(*UNFINISHED)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Give up the lock; a copy in another process has none."""
        _unlock(self.partial)

    @property
    def scratch(self) -> Path:
        """A folder for intermediate results, which an interrupted run finds again and `finish` removes."""
        return self.partial / SCRATCH

    def records(self, shard: int) -> dict[str, Any] | None:
        """Records that `add` wrote for a shard of an earlier run; None if it was not finished."""
        path = self.partial / self._records_name(shard)
        if not path.exists():
            return None
        hint = "Remove it and go on with --resume: its block is done again."
        records = read_json(path, hint)
        if records.pop("fingerprint", None) != _digest(records):
            raise CheckpointError(str(path), "the records of a finished block as they were written", "others", hint)
        return records

    def add(self, shard: int, tensors: Mapping[str, torch.Tensor], records: Mapping[str, Any]) -> None:
        """Write a shard and its records; when this returns they survive a crash."""
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        path = self.partial / self.shard_name(shard)
        bookkeeping = {
            "digests": [tensor_digest(name, tensor) for name, tensor in stored.items()],
            "bytes": sum(tensor.element_size() * tensor.numel() for tensor in stored.values()),
        }
        with named_failures(self.partial):
            save_file(stored, path.with_suffix(".tmp"), metadata={"format": "pt"})
            shutil.copymode(self.partial / STATE_FILE, path.with_suffix(".tmp"))  # safetensors lets nobody else read it
            rename_durably(path.with_suffix(".tmp"), path)
            written = {**records, **bookkeeping}
            self._write_json(self._records_name(shard), {**written, "fingerprint": _digest(written)})

    def finish(
        self,
        source: Path,
        quantization: CheckpointConfig,
        report: Mapping[str, Any],
        card: str,
        untied: bool = False,
    ) -> None:
        """Complete the directory and move it to its destination.

        Args:
            source: model directory, of which config.json and the companion files are taken over.
            quantization: for config.json.
            report: of the run.
            card: the model card.
            untied: the checkpoint's head no longer is the embedding.
        """
        with named_failures(self.partial):
            self._finish(source, quantization, report, card, untied)

    def _finish(
        self, source: Path, quantization: CheckpointConfig, report: Mapping[str, Any], card: str, untied: bool
    ) -> None:
        finished = []
        for shard in range(self.shards):
            if (records := self.records(shard)) is None:
                path, hint = self.partial / self._records_name(shard), "Go on with --resume: its block is done again."
                raise CheckpointError(str(path), "the records of a finished block", "no such file", hint)
            finished.append(records)
        digests = [digest for records in finished for digest in records["digests"]]
        weight_map = {
            digest.split(" ", 1)[0]: self.shard_name(shard)
            for shard, records in enumerate(finished)
            for digest in records["digests"]
        }
        total = sum(records["bytes"] for records in finished)
        self._remove_unfinished_end()
        self._write_json(INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        self._write_json(REPORT_FILE, report)
        (self.partial / "README.md").write_text(card, encoding="utf-8")
        sync(self.partial / "README.md")
        copy_companions(source, self.partial)
        config = model_config(source, untied)
        digests += file_digests(self.partial, RUN_FILES)
        quantization_config = {
            **quantization.to_dict(),
            "fingerprint": fingerprint_of([config_digest(config, quantization), *digests]),
        }
        self._write_json("config.json", {**config, "quantization_config": quantization_config})
        self.seal(source)

    def seal(self, source: Path) -> None:
        """Move a complete directory to its destination, without what only a resumed run would need.

        Args:
            source: model directory, of which the tokenizer was taken over.

        Raises:
            LatqError: it is not valid, as may be if it is an earlier run's; or transformers does not load its
                configuration or its tokenizer. Then config.json is removed, so that a resumed run finishes it again.
        """
        if self.complete:
            self._remove_run_files()
            for problem in verify(self.partial):
                raise problem
        try:
            require_loadable(self.partial, source)
        except CheckpointError:
            if (self.partial / STATE_FILE).exists():
                (self.partial / "config.json").unlink()
            raise
        self._remove_run_files()
        with named_failures(self.partial):
            if self.destination.exists():
                self.destination.rmdir()
            sync(self.partial)
            self._remove(LOCK_FILE)  # as late as can be: whoever makes a new one works in it, too
            rename_durably(self.partial, self.destination)

    def shard_name(self, shard: int) -> str:
        """File name of a shard, counted from 0."""
        return f"model-{shard + 1:05d}-of-{self.shards:05d}.safetensors"

    def _records_name(self, shard: int) -> str:
        return f"records-{shard + 1:05d}.json"

    def _check_same(self, state: Mapping[str, Any]) -> None:
        found = read_json(self.partial / STATE_FILE, "Remove the directory to start over.")
        if found != state:
            old, new = found.get("identity"), state["identity"]
            old = old if isinstance(old, dict) else {}
            changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key)) or ["shards"]
            if changed == ["recipe"] and isinstance(old.get("recipe"), dict):
                before, now = old["recipe"], new["recipe"]
                changed = [f"recipe ({', '.join(sorted(k for k in {*before, *now} if before.get(k) != now.get(k)))})"]
            hint = "Resume with the same options, or remove it to start over."
            expected = "an interrupted run of the same recipe and model"
            raise ConfigError(str(self.partial), expected, f"one with another {', '.join(changed)}", hint)

    def _check_finished(self) -> None:
        """Raise unless what has only to be moved is of this run, which its state told before."""
        report, hint = self.partial / REPORT_FILE, "Move it away, or choose another directory."
        if not report.exists() or read_json(report, hint).get("run") != self.run:
            expected = "a finished run of the same recipe and model"
            raise ConfigError(str(self.partial), expected, "something else", hint)

    def _check_unused(self) -> None:
        """Raise if the directory holds anything but what a run leaves that is killed before it has a state."""
        if left := _left(self.partial):
            expected, hint = f"an interrupted run, with its {STATE_FILE}", "Move it away, or choose another directory."
            raise CheckpointError(str(self.partial), expected, f"{left[0]} without it", hint)

    def _remove_run_files(self) -> None:
        """Remove what only a resumed run would need."""
        with named_failures(self.partial):
            shutil.rmtree(self.scratch, ignore_errors=True)
            self._remove("records-*", *UNFINISHED, STATE_FILE)

    def _remove(self, *patterns: str) -> None:
        for pattern in patterns:
            for file in self.partial.glob(pattern):
                file.unlink()

    def _remove_unfinished_end(self) -> None:
        """Remove what an earlier `finish` wrote that did not come to its end: the model's files may be others now."""
        kept = (*RUN_FILES, "*.safetensors")
        for path in self.partial.iterdir():
            if path.is_dir() and path != self.scratch:
                shutil.rmtree(path)
            elif not any(fnmatch(path.name, name) for name in kept):
                path.unlink()

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        path = self.partial / name
        temporary = path.with_name(path.name + ".tmp")
        temporary.unlink(missing_ok=True)  # nothing is written through a link
        temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        rename_durably(temporary, path)


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
