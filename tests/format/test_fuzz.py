"""Small checkpoints with random damage give the same weights or an error of ours, in bounded memory.

`make fuzz` runs the same properties with many more examples, and a coverage-guided fuzzer on top.
"""

import json
import shutil
import struct
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.builders import tiny_weight
from helpers.checkpoints import SCHEMES, SHAPES, write_tiny_checkpoint
from helpers.fuzz_target import Weights, bounded_memory, check_directory, check_tensors, read_weights
from vllm_latq.format.validate import weight_from_tensors

ENCODINGS = tuple(SCHEMES)
FILES = (
    "config.json",
    "model.safetensors.index.json",
    "latq_report.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
)
DTYPES = ("BOOL", "U8", "I8", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "I64", "F64", "C64", "F8_E4M3", "X")
EXTREMES = (0, 1, -1, 2, 15, 16, 255, 256, 32767, 65535, 65536, 2**24, 2**31 - 1, -(2**31), 2**32, 2**62, 2**64)
# Small blocks that malloc keeps: measured up to 40 MiB.
ALLOCATOR_SLACK = 64 << 20

INTEGERS = st.one_of(st.sampled_from(EXTREMES), st.integers(-(2**70), 2**70))
SCALARS = st.one_of(
    st.none(), st.booleans(), INTEGERS, st.floats(), st.text(max_size=8), st.sampled_from(("ssqr", "..", "\x1b[2J"))
)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner))
fuzz = settings(
    max_examples=settings.default.max_examples // 2,  # 50, or what --hypothesis-profile=fuzz says
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


class Sample(NamedTuple):
    """A valid checkpoint and its weights."""

    directory: Path
    weights: Weights


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sample]:
    root = tmp_path_factory.mktemp("valid")
    directories = {encoding: write_tiny_checkpoint(root / encoding, encoding) for encoding in ENCODINGS}
    return {encoding: Sample(directory, read_weights(directory)) for encoding, directory in directories.items()}


def check(sample: Sample, workplace: Path, file: str, content: bytes) -> bool:
    """Replace one file of a copy, and read the copy."""
    copy = workplace / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sample.directory, copy)
    (copy / file).write_bytes(content)
    return check_directory(copy, sample.weights)


@st.composite
def damaged(draw: Callable[..., Any], content: bytes) -> bytes:
    """Return the bytes with a few overwritten, cut out, inserted or cut off."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(("overwrite", "insert", "delete", "truncate")))
        if how == "truncate":
            del data[at:]
            continue
        new = draw(st.binary(min_size=1, max_size=8))
        data[at : at + (0 if how == "insert" else len(new))] = b"" if how == "delete" else new
    return bytes(data)


@fuzz
@given(data=st.data(), encoding=st.sampled_from(ENCODINGS), file=st.sampled_from(FILES))
def test_changed_bytes_of_any_file(
    samples: dict[str, Sample], tmp_path: Path, data: Any, encoding: str, file: str
) -> None:
    content = (samples[encoding].directory / file).read_bytes()
    check(samples[encoding], tmp_path, file, data.draw(damaged(content)))


@fuzz
@given(data=st.data(), encoding=st.sampled_from(ENCODINGS), file=st.sampled_from(FILES[3:]))
def test_changed_header_of_a_shard(
    samples: dict[str, Sample], tmp_path: Path, data: Any, encoding: str, file: str
) -> None:
    content = (samples[encoding].directory / file).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    entry = header[data.draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))]
    key = data.draw(st.sampled_from(("dtype", "shape", "data_offsets")))
    if key == "dtype":
        entry[key] = data.draw(st.sampled_from(DTYPES))
    else:
        entry[key] = data.draw(st.lists(INTEGERS, max_size=3) | st.permutations(entry[key]))
    text = json.dumps(header).encode()
    check(samples[encoding], tmp_path, file, struct.pack("<Q", len(text)) + text + content[8 + length :])


@fuzz
@given(data=st.data(), encoding=st.sampled_from(ENCODINGS), file=st.sampled_from(FILES[:3]))
def test_changed_values_in_json_files(
    samples: dict[str, Sample], tmp_path: Path, data: Any, encoding: str, file: str
) -> None:
    document = json.loads((samples[encoding].directory / file).read_bytes())
    place, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(place[key], (dict, list)) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    if isinstance(place, dict) and data.draw(st.booleans()):
        place[data.draw(st.text(max_size=6))] = place.pop(key)
    else:
        place[key] = data.draw(JSON)
    check(samples[encoding], tmp_path, file, json.dumps(document).encode())


@fuzz
@given(data=st.data(), encoding=st.sampled_from(ENCODINGS), shape=st.sampled_from(sorted(SHAPES.values())))
def test_changed_tensors_of_a_linear(data: Any, encoding: str, shape: tuple[int, int]) -> None:
    tensors = tiny_weight(SCHEMES[encoding], shape, 0).to_tensors()
    for suffix in data.draw(st.lists(st.sampled_from(sorted(tensors)), min_size=1, max_size=2, unique=True)):
        tensors[suffix] = data.draw(mutated(tensors[suffix]))
    check_tensors(tensors, SCHEMES[encoding], shape)


@st.composite
def mutated(draw: Callable[..., Any], tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with elements set, swapped or cut off, or in another shape or dtype."""
    how = draw(st.sampled_from(("bits", "swap", "cut", "grow", "reshape", "cast")))
    raw = tensor.clone().reshape(-1).view(torch.uint8)
    if how == "bits":
        for _ in range(draw(st.integers(1, 3))):
            raw[draw(st.integers(0, raw.numel() - 1))] ^= draw(st.integers(1, 255))
        return raw.view(tensor.dtype).reshape(tensor.shape)
    if how == "swap":
        at, size = draw(st.tuples(st.integers(0, tensor.numel() - 1), st.just(tensor.element_size())))
        rows = raw.reshape(-1, size)
        return rows.roll(at, 0).contiguous().view(tensor.dtype).reshape(tensor.shape)
    if how == "cut":
        return tensor[: draw(st.integers(0, tensor.shape[0] - 1))].clone()
    if how == "grow":
        return torch.cat([tensor.view(torch.uint8), tensor.view(torch.uint8)]).view(tensor.dtype)
    if how == "reshape":
        return tensor.reshape(draw(st.sampled_from([(-1,), (1, -1), (-1, 1, 1)])))
    return tensor.to(draw(st.sampled_from((torch.float64, torch.bool, torch.int64, torch.uint8, torch.complex64))))


@fuzz
@given(
    lengths=st.lists(st.integers(0, 16), max_size=40),
    first=st.sampled_from((0, -3, 2**31 - 1, 2**31 - 5, -(2**31))),
    chunk_bits=st.lists(st.integers(0, 65535), min_size=2, max_size=2),
    stream=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50),
)
def test_random_huffman_tables(lengths: list[int], first: int, chunk_bits: list[int], stream: list[int]) -> None:
    check_tensors(
        {
            "weight_shape": torch.tensor([40, 36], dtype=torch.int32),
            "scale": torch.ones(1),
            "first_symbol": torch.tensor([first], dtype=torch.int32),
            "code_lengths": torch.tensor(lengths, dtype=torch.uint8),
            "chunk_bits": torch.tensor(chunk_bits, dtype=torch.int32).reshape(2, 1).to(torch.uint16),
            "stream": torch.tensor(stream, dtype=torch.int32),
        },
        SCHEMES["huffman"],
        (40, 36),
    )


@fuzz
@given(
    rates=st.lists(st.integers(0, 15), min_size=2, max_size=2),
    valid=st.booleans(),
    missing=st.sampled_from((0, 0, 0, 1, -1, 64)),
    exponents=st.lists(st.integers(-128, 127), min_size=3, max_size=3),
    octaves=st.integers(-130, 130),
    kept=st.lists(st.integers(-2, 650), max_size=5),
)
def test_random_trellis_tensors(
    rates: list[int], valid: bool, missing: int, exponents: list[int], octaves: int, kept: list[int]
) -> None:
    """Accepted exactly if they are a trellis: a plain re-reading of FORMAT.md section 3.4 decides."""
    if valid:
        rates, octaves, kept = [2 + rate % 11 for rate in rates], octaves // 2, sorted({abs(at) % 650 for at in kept})
    words = 4 * (8 * rates[0] + rates[1]) - missing
    row, column, other = (torch.tensor([exponent], dtype=torch.int8) for exponent in exponents)
    tensors = {
        "weight_shape": torch.tensor([5, 130], dtype=torch.int32),
        "scale": torch.tensor([2.0**octaves]),
        "row_exponents": row.repeat(5),
        "column_exponents": torch.cat((column.repeat(100), other.repeat(30))),
        "column_importance": other.repeat(130),
        "rates": torch.tensor([rates], dtype=torch.uint8),
        "trellis": torch.arange(max(0, words), dtype=torch.int32),
        "kept_positions": torch.tensor(kept, dtype=torch.int32),
        "kept_values": torch.ones(len(kept), dtype=torch.bfloat16),
    }
    powers = [octaves + (exponents[0] + more) / 8 for more in (0, *exponents[1:])]
    right = (
        all(2 <= rate <= 12 for rate in rates)
        and missing == 0
        and -116 <= min(powers) <= max(powers) <= 116
        and all(0 <= at < 650 for at in kept)
        and kept == sorted(set(kept))
    )
    assert check_tensors(tensors, SCHEMES["trellis"], (5, 130)) is right


@fuzz
@given(
    rows=st.lists(st.lists(st.integers(0, 8), max_size=4), min_size=3, max_size=3),
    sort=st.booleans(),
    damage=st.none() | st.tuples(st.integers(0, 3), st.integers(-2, 13)),
)
def test_random_csr_arrays(rows: list[list[int]], sort: bool, damage: tuple[int, int] | None) -> None:
    """Accepted exactly if the arrays are a CSR matrix: a plain re-reading of FORMAT.md section 3.2 decides."""
    columns = [column for row in rows for column in (sorted(set(row)) if sort else row)]
    row_ptr = [0, *accumulate(len(set(row)) if sort else len(row) for row in rows)]
    if damage is not None:
        row_ptr[damage[0]] = damage[1]
    tensors = dict(tiny_weight(SCHEMES["ssqr"], (3, 8), 0).to_tensors())
    tensors["qweight"] = torch.full((3, 1), sum(4 << (3 * column) for column in range(8)), dtype=torch.int32)
    tensors["outlier_row_ptr"] = torch.tensor(row_ptr, dtype=torch.int32)
    tensors["outlier_col_idx"] = torch.tensor(columns, dtype=torch.int32).to(torch.uint16)
    tensors["outlier_values"] = torch.ones(len(columns), dtype=torch.bfloat16)
    stored = [columns[low:high] for low, high in pairwise(row_ptr)]
    right = (
        row_ptr == sorted(row_ptr)
        and (row_ptr[0], row_ptr[-1]) == (0, len(columns))
        and all(row == sorted(set(row)) for row in stored)
        and all(column < 8 for column in columns)
    )
    assert check_tensors(tensors, SCHEMES["ssqr"], (3, 8)) is right


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_loading_takes_at_most_twice_the_declared_memory(encoding: str) -> None:
    """The declared memory is that of the stored bytes and of the float32 matrix of `weight_shape`."""
    shape = (3072, 3072)
    tensors = tiny_weight(SCHEMES[encoding], shape, 0).to_tensors()
    declared = sum(tensor.nbytes for tensor in tensors.values()) + 4 * shape[0] * shape[1]
    with bounded_memory(2 * declared + ALLOCATOR_SLACK):
        weight_from_tensors(tensors, SCHEMES[encoding], shape, "layer").dequantize()
