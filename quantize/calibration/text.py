"""Text for calibration and evaluation, by name.

A name is that of a UTF-8 file, of a dataset (of the Hugging Face hub, a folder or file), or of the bundled text.
Sources of conversations are read by `chats`.

Invariant: what is returned is never empty, and depends only on the source, the split, the seed and, for calibration,
on how many characters are wanted. For calibration a bounded part of a source is read, however large the source is:

    text file   whole up to READ_WHOLE bytes. Of a larger file, EXCERPTS pieces at even distances, together as large as
                what is wanted, and at least READ_WHOLE bytes. A piece is cut to whole lines, where it has any
    documents   in the order of the file, or drawn through a buffer, until they have the characters that are wanted. A
                document is read up to that many characters (at least READ_WHOLE)
"""

import codecs
import glob
import io
import json
import logging
import lzma
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from vllm_latq.errors import CalibrationError, summary

# Documents are drawn through a buffer of so many documents, or of so many as have these characters, by the mean length
# of the first of them: 10,000 documents of C4 have 22 million. A hub dataset is streamed, never downloaded whole.
SHUFFLE_BUFFER, SHUFFLE_BUFFER_CHARS, DOCUMENTS_MEASURED = 10_000, 1 << 26, 100
# Bytes of a text file, and characters of a document, that are read in any case: they are tokenized in 2 seconds.
READ_WHOLE = 1 << 21
# Enough pieces to see every part of a file that is ordered by subject; each has thousands of tokens.
EXCERPTS = 64
# Text that comes with this package: English prose, documentation and code, 2.4 million characters. `bundled.md` says
# what it is made of and under which licences.
BUNDLED = "bundled"
_BUNDLED_FILE = Path(__file__).with_name("bundled.txt.xz")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")
# Files of documents, in a column `text`, and what of `datasets` reads them.
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
FILE_SUFFIXES = {".txt", ".md", ".rst", ".text", ".log", *READERS}
# Hints for a dataset that cannot be read: one on this machine, and one on the hub.
ON_DISK = "A file may be damaged, or in another format than its suffix says: write it again, or pass a text file."
ON_HUB = "Check the name, the configuration and the connection to the hub, or pass a text file."


@dataclass(frozen=True)
class Dataset:
    """A dataset: where it lies, which files and splits, and what joins its documents; of the papers' own, as they do.

    `shuffle` is False where consecutive rows belong together (WikiText-2's rows are single lines).
    `evaluation_rows` and `evaluation_windows` are GPTQ's limits (its `datautils.py`); None reads everything.
    """

    path: str
    config: str | None = None
    data_files: dict[str, str] | None = None
    evaluation_split: str = "test"
    separator: str = "\n\n"
    shuffle: bool = True
    evaluation_rows: int | None = None
    evaluation_windows: int | None = None


KNOWN_DATASETS = {
    "wikitext2": Dataset("Salesforce/wikitext", config="wikitext-2-raw-v1", shuffle=False),
    "c4": Dataset(
        "allenai/c4",
        data_files={
            "train": "en/c4-train.00000-of-01024.json.gz",
            "validation": "en/c4-validation.00000-of-00008.json.gz",
        },
        evaluation_split="validation",
        separator=" ",
        evaluation_rows=1100,
        evaluation_windows=256,
    ),
}


class Excerpt(NamedTuple):
    """Text of a source, and whether it is all the text that the source has."""

    text: str
    whole: bool


def calibration_text(source: str, max_chars: int, seed: int = 0) -> Excerpt:
    """Return at least `max_chars` characters to calibrate on, or the whole text of a smaller source.

    Args:
        source: `bundled`, a text file, `wikitext2`, `c4`, `org/name[:config]`, a folder `datasets.load_dataset` can
            read, or a file of documents, one of READERS. A dataset gives documents of its training split.
        max_chars: how many characters are wanted.
        seed: of the order in which a dataset's documents are drawn.

    Raises:
        CalibrationError: the source does not exist, cannot be read or holds no text.
    """
    if source == BUNDLED:
        return Excerpt(lzma.decompress(_BUNDLED_FILE.read_bytes()).decode("utf-8"), True)
    dataset, bound = resolve(source), max(max_chars, READ_WHOLE)
    if dataset is None:
        return _excerpt(Path(source), bound)
    kept: list[str] = []
    total, whole = 0, True
    for document in _documents(source, dataset, "train", seed if dataset.shuffle else None, bound):
        if total >= max_chars:
            whole = False
            break
        kept.append(document)
        total += len(document)
        whole &= len(document) < bound
    return Excerpt(_not_blank(dataset.separator.join(kept), f"{source} (split train)"), whole)


def evaluation_text(source: str) -> str:
    """The text to evaluate on: the whole file, or a dataset's held-out split in its own order.

    Args and errors as in `calibration_text`; the split is `test`, C4's is `validation`. The bundled text is refused:
    a model would be judged by what it was calibrated on.
    """
    if source == BUNDLED:
        raise CalibrationError(f"text source {source!r}", "text for evaluation", "the bundled text for calibration")
    dataset = resolve(source)
    if dataset is None:
        return read_text_file(Path(source))
    kept: list[str] = []
    for document in _documents(source, dataset, dataset.evaluation_split, None):
        kept.append(document)
        if len(kept) == dataset.evaluation_rows:
            break
    return _not_blank(dataset.separator.join(kept), f"{source} (split {dataset.evaluation_split})")


def evaluation_split(source: str) -> str:
    """Return the split of a dataset that is for evaluation; a file is one split, by any name."""
    dataset = resolve(source) if source != BUNDLED else None
    return "test" if dataset is None else dataset.evaluation_split


def evaluation_windows(source: str) -> int | None:
    """The number of windows the papers evaluate of this source, None for all."""
    known = KNOWN_DATASETS.get(source)
    return known.evaluation_windows if known is not None else None


def resolve(source: str) -> Dataset | None:
    """The dataset `source` names, or None if it is a file."""
    path = Path(source)
    # Path("") is the current folder, which nobody meant.
    if source and path.is_dir():
        return Dataset(source)
    if source and path.exists():
        reader = READERS.get(path.suffix.lower())
        file = glob.escape(source)  # `datasets` takes patterns
        return Dataset(reader, data_files={"train": file, "test": file}) if reader else None
    if source in KNOWN_DATASETS:
        return KNOWN_DATASETS[source]
    if HUB_NAME.fullmatch(source) and path.suffix.lower() not in FILE_SUFFIXES and not source.startswith("."):
        name, _, config = source.partition(":")
        return Dataset(name, config=config or None)
    raise CalibrationError(
        f"text source {source!r}",
        f"an existing text file, {', '.join((BUNDLED, *KNOWN_DATASETS))}, or a hub dataset org/name[:config]",
        "no such file" if path.suffix or "/" in source else "neither a file nor a known dataset",
        "Check the path; a relative path starts from the current folder.",
    )


def read_text_file(path: Path) -> str:
    """Return the text of a file; CalibrationError if it cannot be read or is blank."""
    where = f"text file {path}"
    try:
        # utf-8-sig: a byte order mark at the front is no text.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where) from error
    except OSError as error:
        raise _unreadable(error, where) from error
    return _not_blank(text, where)


def _excerpt(path: Path, bound: int) -> Excerpt:
    """Return the whole text of a file of at most `bound` bytes; of a larger file, pieces that have them together."""
    where, pieces = f"text file {path}", []
    try:
        if (size := path.stat().st_size) <= bound:
            return Excerpt(read_text_file(path), True)
        length = bound // EXCERPTS
        with path.open("rb") as file:
            for index in range(EXCERPTS):
                start = file.seek((size - length) * index // (EXCERPTS - 1))
                pieces.append(_piece(file.read(length), start, where))
    except OSError as error:
        raise _unreadable(error, where) from error
    return Excerpt(_not_blank("\n".join(pieces), f"{where}, {EXCERPTS} pieces of it"), False)


def _piece(data: bytes, start: int, where: str) -> str:
    """Return the whole lines of a piece of a file, which begins at byte `start`; its characters if it has no lines."""
    first, last = data.find(b"\n") + 1 if start else 0, data.rfind(b"\n") + 1
    first, last = (first, last) if first < last else (0, len(data))
    # Characters that are cut off at the ends are left out: bytes 0x80 to 0xbf continue a character.
    lines = data[first:last].lstrip(bytes(range(0x80, 0xC0)) if start else b"")
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(lines)
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where, start + last - len(lines)) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _unreadable(error: OSError, where: str) -> CalibrationError:
    """Return the error of a file that the system does not open or read."""
    hint = "Check its name." if isinstance(error, FileNotFoundError) else "Check its permissions."
    return CalibrationError(where, "a readable file", str(error.strerror or error), hint)


def _not_utf8(error: UnicodeDecodeError, where: str, start: int = 0) -> CalibrationError:
    """Return the error of bytes that begin at byte `start` of a file."""
    found, hint = f"{error.reason} at byte {start + error.start}", "Unpack it, or convert it to UTF-8, e.g. with iconv."
    return CalibrationError(where, "UTF-8 text", found, hint)


def _documents(
    source: str, dataset: Dataset, split: str, seed: int | None, longest: int | None = None
) -> Iterator[str]:
    """Yield the `text` fields of a split, in the order of `dataset_rows`, cut to `longest` characters."""
    rows = dataset_rows(source, dataset, split, seed)
    yield from (text[:longest] for text in _texts(rows, f"dataset {source} (split {split})"))


def dataset_rows(source: str, dataset: Dataset, split: str, seed: int | None) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a split, streamed; drawn in a seeded random order unless `seed` is None.

    Raises:
        CalibrationError: the `datasets` library is missing, or cannot read the dataset.
    """
    where = f"dataset {source} (split {split})"
    try:
        import datasets
    except ImportError as error:
        raise CalibrationError(
            where,
            "the `datasets` library to read it with",
            "it is not installed",
            "Run pip install datasets, or pass a text file.",
        ) from error
    # Readers of files log the errors that are raised below.
    readers = logging.getLogger("datasets.packaged_modules")
    level = readers.level
    readers.setLevel(logging.CRITICAL + 1)
    try:
        rows: Any = datasets.load_dataset(
            dataset.path, dataset.config, split=split, data_files=dataset.data_files, streaming=True
        )
        if seed is not None:
            first = [_characters(row) for row in islice(rows, DOCUMENTS_MEASURED)]
            fitting = SHUFFLE_BUFFER_CHARS * len(first) // max(1, sum(first))
            rows = rows.shuffle(seed=seed, buffer_size=max(1, min(SHUFFLE_BUFFER, fitting)))
        yield from rows
    except (OSError, ValueError, RecursionError, StopIteration, datasets.exceptions.DatasetsError) as error:
        raise CalibrationError(
            where,
            "a dataset that can be read",
            "no rows" if isinstance(error, StopIteration) else summary(error),
            ON_DISK if Path(source).exists() else ON_HUB,
        ) from error
    finally:
        readers.setLevel(level)


def _characters(row: Mapping[str, Any]) -> int:
    """Return how many characters a row has."""
    text = row.get("text")
    return len(text) if isinstance(text, str) else len(str(row))


def read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each record of a file of JSON lines, or of one JSON array.

    Tools of a record differ from those of the next, so no common type is sought for the columns, as `datasets` does.
    A file that does not begin with a JSON value has no records.
    """
    where = f"text file {path}"
    begun, number = False, 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines: Iterable[str] = file
            if path.suffix.lower() == ".json":
                text = file.read()
                lines = io.StringIO(text)
                if text.lstrip().startswith("["):
                    yield from ((f"{where}, record {number}", one) for number, one in enumerate(json.loads(text), 1))
                    return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{where}, line {number}", json.loads(line)
                    begun = True
    except UnicodeDecodeError as error:
        raise _not_utf8(error, where) from error
    except (ValueError, RecursionError) as error:
        if begun:
            where = f"{where}, line {number}"
            raise CalibrationError(where, "a JSON object", summary(error), "Mend the line.") from error
    except OSError as error:
        raise _unreadable(error, where) from error


def _texts(rows: Iterable[Any], where: str) -> Iterator[str]:
    """Yield the text of each row."""
    for row in rows:
        if "text" not in row:
            hint = "Conversations are in columns `messages`, `conversations`, or `instruction` and `output`."
            raise CalibrationError(where, "a column `text` of strings", f"the columns {', '.join(row)}", hint)
        if not isinstance(row["text"], str):
            found = f"a row whose text is {row['text']!r:.60}"
            raise CalibrationError(where, "a column `text` of strings", found, "Remove the row, or mend it.")
        yield row["text"]


def _not_blank(text: str, where: str) -> str:
    if not text.strip():
        raise CalibrationError(where, "some text", "none", "Pass a source that is not empty.")
    if "\0" in text:
        hint = "Pass a text file, or documents in .jsonl, .csv or .parquet."
        raise CalibrationError(where, "text", f"a NUL at character {text.index(chr(0))}", hint)
    return text
