"""Hostile checkpoints: each attack is refused by an error of ours that names the place."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import SCHEMES, edit_json, edit_tensor, list_twice, problems, write_tiny_checkpoint
from helpers.fuzz_target import bounded_memory
from vllm_latq.cli.inspect import inspect_checkpoint
from vllm_latq.cli.main import main
from vllm_latq.errors import LatqError, printable
from vllm_latq.format.files import TensorStore, read_json
from vllm_latq.format.reader import CheckpointReader, checkpoint_fingerprint

ENCODINGS = tuple(SCHEMES)
SHARD, INDEX, REPORT = "model-00001-of-00002.safetensors", "model.safetensors.index.json", "latq_report.json"


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[[str], Path]:
    return lambda encoding: write_tiny_checkpoint(tmp_path / encoding, encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_undamaged_tiny_checkpoints_are_valid(tiny: Callable[[str], Path], encoding: str) -> None:
    assert problems(tiny(encoding)) == ""


HEADERS = {
    "overlap": {
        "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
    },
    "negative": {"a": {"dtype": "U8", "shape": [4], "data_offsets": [-2, 2]}},
    "past the end": {"a": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}},
    "product overflows": {"a": {"dtype": "U8", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}},
    "dtype unknown": {"a": {"dtype": "PICKLE", "shape": [4], "data_offsets": [0, 4]}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_bad_safetensors_header(tmp_path: Path, name: str) -> None:
    header = json.dumps(HEADERS[name]).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(6))
    with pytest.raises(LatqError, match=r"model\.safetensors: expected a valid safetensors file"):
        TensorStore(tmp_path).names()


def test_safetensors_header_with_a_name_twice(tiny: Callable[[str], Path]) -> None:
    """Some readers take the first of the two tensors, others the last."""
    path = tiny("packed")
    name = list_twice(path / SHARD)
    assert f"{SHARD}: expected a header with each key once, found the key '{name}' 2 times" in problems(path)


@pytest.mark.parametrize("length", [0, 2**63, 2**64 - 1, 1 << 20])
def test_bad_length_of_the_safetensors_header(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(LatqError, match="expected a valid safetensors file"):
        TensorStore(tmp_path).names()


@pytest.mark.parametrize("name", ["two words", "two\nlines", "\ud800", "bell\a", ""])
def test_tensor_name_that_could_forge_a_line_of_the_fingerprint(tiny: Callable[[str], Path], name: str) -> None:
    path = tiny("packed")
    (path / INDEX).unlink()
    save_file({name.replace("\ud800", "\x7f"): torch.ones(1)}, path / "model.safetensors")
    assert "expected tensor names of printable characters without blanks" in problems(path)


NO_FOLDER = "model.safetensors.index.json: expected file names without a folder, found"
NOT_A_FILE = "expected a safetensors file, found not a regular file"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        *((name, f"{NO_FOLDER} '{name}'") for name in ("../secret.safetensors", "/etc/passwd", ".", "a/b")),
        ("..", f"/..: {NOT_A_FILE}"),
        ("", f"/packed: {NOT_A_FILE}"),
        ("a\0b", r"/a\x00b: expected a safetensors file, found"),
        ("x" * 300, "File name too long"),
    ],
    ids=["sibling", "absolute", "itself", "folder", "parent", "empty", "zero byte", "long"],
)
def test_index_entry_outside_the_directory(tiny: Callable[[str], Path], file: str, message: str) -> None:
    path = tiny("packed")
    edit_json(path / INDEX, lambda index: index["weight_map"].update(dict.fromkeys(index["weight_map"], file)))
    assert message in problems(path)


def test_link_that_points_outside_the_directory(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    path = tiny("packed")
    shutil.move(path / SHARD, tmp_path / "elsewhere.safetensors")
    (path / SHARD).symlink_to(tmp_path / "elsewhere.safetensors")
    assert "found a link that points outside the directory" in problems(path)


def test_links_of_the_hugging_face_cache_are_followed(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "c0ffee", tmp_path / "hub" / "blobs"
    shutil.copytree(tiny("packed"), snapshot)
    (snapshot / "1_Pooling").mkdir()
    (snapshot / "1_Pooling" / "config.json").write_text("{}")
    edit_json(snapshot / "config.json", lambda config: config["quantization_config"].update(fingerprint=""))
    fingerprint = checkpoint_fingerprint(CheckpointReader(snapshot))
    edit_json(snapshot / "config.json", lambda config: config["quantization_config"].update(fingerprint=fingerprint))
    blobs.mkdir()
    for file in [path for path in snapshot.rglob("*") if path.is_file()]:
        blob = blobs / file.relative_to(snapshot).as_posix().replace("/", "-")
        shutil.move(file, blob)
        file.symlink_to(os.path.relpath(blob, file.parent))
    assert problems(snapshot) == ""


def test_beside_names_a_matrix_without_tensors(tiny: Callable[[str], Path]) -> None:
    path, scheme = tiny("packed"), {"encoding": "packed", "bits": 8, "group_size": 32}
    edit_json(path / "config.json", lambda config: config["quantization_config"].update(beside={"model.foo": scheme}))
    assert "model.foo: expected a tensor weight_shape, as `beside` in config.json says, found none" in problems(path)
    for command in ("inspect", "report"):
        assert main([command, str(path)]) == 1


STRAYS = (
    *("model.safetensors", "consolidated.safetensors", "model.fp16.safetensors", "pytorch_model.bin", "weights.PT"),
    *("a.pth", "a.gguf", "a.ckpt", "consolidated.safetensors.index.json", "adapter_config.json"),
)


@pytest.mark.parametrize("name", STRAYS)
def test_weight_file_that_the_index_does_not_name(tiny: Callable[[str], Path], name: str) -> None:
    """vLLM prefers consolidated.safetensors, transformers model.safetensors; options make either take the others."""
    path = tiny("packed")
    (path / name).write_bytes(b"")
    assert problems(path).startswith(f"{path}: expected only the tensors of the index, found {name}. Other readers")


def test_single_file_with_other_weights_beside_it(tiny: Callable[[str], Path]) -> None:
    path = tiny("packed")
    tensors = {name: tensor for shard in path.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    for name in (INDEX, SHARD, SHARD.replace("00001-of", "00002-of")):
        (path / name).unlink()
    save_file(tensors, path / "model.safetensors")
    assert problems(path) == ""
    save_file(tensors, path / "model-00001-of-00002.safetensors")
    assert f"found {SHARD}. Other readers" in problems(path)


@pytest.mark.parametrize("part", [None, "text_config"])
def test_key_of_the_config_that_redirects_loading(tiny: Callable[[str], Path], part: str | None) -> None:
    path, key = tiny("packed"), {"transformers_weights": "other.safetensors"}
    edit_json(path / "config.json", lambda config: config.update({part: key} if part else key))
    expected = "expected no key `transformers_weights` that names files"
    assert f"config.json: {expected}, found one. Remove it" in problems(path)


@pytest.mark.parametrize("metadata", [None, [], "x"])
def test_index_whose_metadata_is_no_object(tiny: Callable[[str], Path], metadata: object) -> None:
    path = tiny("packed")
    edit_json(path / INDEX, lambda index: index.update(metadata=metadata))
    assert f"{INDEX}: expected an object `metadata`, found {metadata!r}" in problems(path)


@pytest.mark.parametrize("metadata", ["null", '{"format": null}', '{"format": {"a": "b"}}'])
def test_metadata_in_a_header(tiny: Callable[[str], Path], metadata: str) -> None:
    """Null counts as no metadata; other values that are not text are refused."""
    path = tiny("packed")
    content = (path / SHARD).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].replace(b'{"format":"pt"}', metadata.encode())
    assert header != content[8:end]
    (path / SHARD).write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    assert problems(path) == "" if metadata == "null" else f"{SHARD}: expected a valid safetensors" in problems(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("file", ["config.json", INDEX, SHARD, "."])
def test_file_without_the_permission_to_read_it(tiny: Callable[[str], Path], file: str) -> None:
    path = tiny("packed")
    (path / file).chmod(0)
    try:
        assert "Change its permissions, or run as a user who may read it." in problems(path)
    finally:
        (path / file).chmod(0o700)


@pytest.mark.parametrize("file", ["config.json", INDEX, REPORT, SHARD])
def test_pipe_in_place_of_a_file_does_not_hang(tiny: Callable[[str], Path], file: str) -> None:
    path = tiny("packed")
    (path / file).unlink()
    os.mkfifo(path / file)
    assert "found not a regular file" in problems(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "found the key 'a' 2 times"),
        ('{"a": {"b": 1, "b": 1}}', "found the key 'b' 2 times"),
        ('{"a": NaN}', "found NaN, which is not JSON"),
        ('{"a": -Infinity}', "found -Infinity, which is not JSON"),
        ('{"a": ' + "1" * 5000 + "}", "limit"),
        ('{"a":' * 100_000, "readable JSON"),
        ("\x1b]0;owned\x07", "readable JSON"),
    ],
    ids=["duplicate", "nested duplicate", "nan", "infinity", "long integer", "deep", "escape"],
)
def test_json_on_which_parsers_disagree(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LatqError, match="expected a readable JSON file") as caught:
        read_json(tmp_path / "config.json")
    assert message in str(caught.value)


def test_json_too_large_to_parse(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 33)  # sparse
    with pytest.raises(LatqError, match=r"expected at most \d+ bytes of JSON, found 8589934592"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("shape", [[2**31 - 1, 2**31 - 1], [2**31 - 1, 1], [1, 2**31 - 1], [2**20, 2**20]])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_declared_shape_far_beyond_the_tensors(tiny: Callable[[str], Path], encoding: str, shape: list[int]) -> None:
    path = tiny(encoding)
    edit_tensor(path, "layers.0.up.weight_shape", torch.tensor(shape, dtype=torch.int32))
    assert "layers.0.up" in problems(path)
    with pytest.raises(LatqError):
        CheckpointReader(path).weight("layers.0.up")


def test_rates_cannot_declare_a_large_matrix(tiny: Callable[[str], Path]) -> None:
    """The exponents and rates of 2^31 weights take 1.3 MB; a rate for each tile would take 64 MiB, the matrix 8 GiB."""
    path, name, rows, columns = tiny("trellis"), "layers.0.up", 2**20, 2**11
    edit_tensor(path, f"{name}.weight_shape", torch.tensor([rows, columns], dtype=torch.int32))
    edit_tensor(path, f"{name}.row_exponents", torch.zeros(rows, dtype=torch.int8))
    edit_tensor(path, f"{name}.column_exponents", torch.zeros(columns, dtype=torch.int8))
    edit_tensor(path, f"{name}.column_importance", torch.zeros(columns, dtype=torch.int8))
    edit_tensor(path, f"{name}.rates", torch.full((rows // 64, columns // 128), 12, dtype=torch.uint8))
    with bounded_memory(24 << 20):
        assert f"{name}.trellis: expected 402653184 words, which its rates take" in problems(path)
        with pytest.raises(LatqError, match="402653184 words"):
            CheckpointReader(path).weight(name)


def test_empty_chunks_cannot_declare_a_large_matrix(tiny: Callable[[str], Path]) -> None:
    # Two megabytes of chunk lengths that are all zero would declare a matrix of 8 GiB.
    path, name = tiny("huffman"), "layers.0.up"
    edit_tensor(path, f"{name}.weight_shape", torch.tensor([2**30, 1], dtype=torch.int32))
    edit_tensor(path, f"{name}.chunk_bits", torch.zeros(2**20, 1, dtype=torch.uint16))
    edit_tensor(path, f"{name}.stream", torch.zeros(0, dtype=torch.int32))
    with pytest.raises(LatqError, match=r"chunk_bits: expected at least one bit for each weight"):
        CheckpointReader(path).weight(name)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3, dtype=torch.int32),
        torch.tensor([[3, 3]], dtype=torch.int32),
        torch.tensor([float("nan"), 2.0]),
        torch.tensor([9, 66], dtype=torch.int64),
        torch.tensor([-9, -66], dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.tensor([True, True]),
    ],
    ids=["0-d", "2-d", "float", "int64", "negative", "empty", "bool"],
)
def test_malformed_weight_shape(tiny: Callable[[str], Path], tensor: torch.Tensor) -> None:
    path = tiny("ssqr")
    edit_tensor(path, "layers.0.up.weight_shape", tensor)
    assert "layers.0.up.weight_shape: expected two positive int32 sizes" in problems(path)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_tensors_of_wrong_dtype_or_shape(tiny: Callable[[str], Path], encoding: str) -> None:
    path = tiny(encoding)
    original = CheckpointReader(path).tensors("layers.0.up")
    for suffix, tensor in original.items():
        for other in (tensor.double(), tensor.to(torch.bool), tensor.reshape(-1, 1, 1), tensor.sum(), tensor[:0]):
            edit_tensor(path, f"layers.0.up.{suffix}", other)
            assert "layers.0.up." in problems(path), suffix
        edit_tensor(path, f"layers.0.up.{suffix}", tensor)


def test_linear_that_hides_its_shape(tiny: Callable[[str], Path]) -> None:
    path = tiny("ssqr")
    edit_tensor(path, "layers.1.up.weight_shape", None)
    edit_json(path / INDEX, lambda index: index["weight_map"].pop("layers.1.up.weight_shape"))
    assert "layers.1.up: expected a tensor weight_shape, found none" in problems(path)


@pytest.mark.parametrize(
    "layers",
    [None, 3, [3], [{}], [{"name": ["x"]}], [{"name": "x", "error": "<b>"}], [{"name": "x", "bound": 10**400}],
     [{"name": "x", "bound_holds": "yes"}], [{"name": "x", "bits": True}]],
)  # fmt: skip
def test_report_with_values_of_wrong_types(tiny: Callable[[str], Path], layers: Any) -> None:
    path = tiny("packed")
    (path / REPORT).write_text(json.dumps({"layers": layers}))
    assert "latq_report.json: layers" in problems(path)
    with pytest.raises(LatqError):
        inspect_checkpoint(path)


def test_error_messages_carry_no_control_characters_and_stay_short() -> None:
    error = LatqError("where\x1b[2J", "x" * 10**6, "a\nb\u202e")
    assert str(error).isprintable()
    assert len(str(error)) < 5000
    assert printable("tab\tend") == r"tab\tend"
