"""The table of launch configurations: what it answers is pinned, and its rows are checked."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from vllm_latq.kernels import configs
from vllm_latq.kernels.configs import (
    ADA,
    AMD,
    DEFAULT,
    REGIMES,
    SIMT,
    TABLE,
    TRITON,
    TUNED,
    DecodeConfig,
    decode_config,
    max_decode_rows,
    spreads,
    table_of,
    timed_rows,
)
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.layout.weight import HIP

UNKNOWN = "sm_130"  # stands for any architecture without a table
# sha256 of `answers`. Whoever changes a row of the table on purpose replaces the digest of its architectures; rows that
# were timed (`tuned.json`) are not in it.
ANSWERS = {
    "sm_80": "426d72a452f50dbb",
    "sm_86": "f66c57ff24796e2d",
    "sm_87": "f66c57ff24796e2d",
    "sm_89": "f66c57ff24796e2d",
    "sm_90": "80164343f6713cc1" if TRITON < (3, 8) else "46f30abe7700d288",
    "sm_100": "62858e0aafd6e10f",
    "sm_103": "62858e0aafd6e10f",
    "sm_110": "62858e0aafd6e10f",
    "sm_120": "96abbdf3cad3f428",
    "sm_121": "96abbdf3cad3f428",
    "": "f66c57ff24796e2d",
    HIP: "3c4f5b2c1c470cf0",
    UNKNOWN: "c48401f1ab87c63a",
}


def answers(arch: str) -> str:
    """Return a line of JSON for every product: bits, rows, group size and the fields of its launch configuration."""
    lines = []
    for bits in (2, 3, 4, 8):
        for rows in range(1, max_decode_rows(bits) + 1):
            for group_size in (32, 64, 128, -1):
                rows_of_table = TABLE.get(arch, DEFAULT)
                fields = asdict(next(row for row in rows_of_table if row.serves(rows, bits, group_size)))
                del fields["source"]
                assert not fields.pop("dependent")  # not timed
                assert not fields.pop("spread")  # not timed
                lines.append(json.dumps([bits, rows, group_size, fields], sort_keys=True))
    return "\n".join(lines)


@pytest.mark.parametrize("arch", ANSWERS)
def test_table_answers_as_recorded(arch: str) -> None:
    assert hashlib.sha256(answers(arch).encode()).hexdigest()[:16] == ANSWERS[arch]


def test_every_architecture_of_the_table_is_recorded() -> None:
    assert ANSWERS.keys() == {*TABLE, UNKNOWN}


def test_rows_are_sorted_by_what_they_serve() -> None:
    """The first row that serves a product is taken: after it come more rows of x, or smaller groups."""
    for rows in TABLE.values():
        keys = [(row.max_rows, -row.min_group) for row in rows]
        assert keys == sorted(set(keys))
        assert {row.max_rows for row in rows} == set(REGIMES)


def test_tiles_that_do_not_divide_the_padded_rows_are_refused() -> None:
    """128 rows would otherwise make no tile of 256 at all, and y would stay unwritten."""
    with pytest.raises(KernelInputError, match="64 or 128, which divide the padded rows"):
        DecodeConfig(8, 1, block_n=256, num_warps=4, stages=3, bias_dot=True)


def test_timed_rows_are_valid_and_name_where_they_were_timed() -> None:
    for arch, rows in json.loads(TUNED.read_text()).items():
        assert arch in TABLE
        for row in rows:
            assert all(word in DecodeConfig(**row).source for word in ("--tune", "torch", "Triton", "20"))


ROW = asdict(replace(ADA[0], spread=True))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "tuned.json: expected timed rows, in JSON, found Expecting property name"),
        (None, "tuned.json: expected timed rows, in JSON, found .* No such file"),
        ("[]", "tuned.json: expected an object of lists of rows, found list"),
        (json.dumps({"sm_86": [ROW, 8]}), "tuned.json: 'sm_86', row 2: expected an object, found int"),
        (json.dumps({"sm_86": [ROW | {"warps": 2}]}), "row 1: expected the fields max_rows, .*, source, found 'warps'"),
        (json.dumps({"sm_86": [{"max_rows": 8}]}), "row 1: expected a field '[a-z_]+', found none"),
        (json.dumps({"sm_86": [ROW | {"spread": "false"}]}), "row 1, spread: expected bool, found str"),
        (json.dumps({"sm_86": [ROW | {"spread": 1}]}), "row 1, spread: expected bool, found int"),
        (json.dumps({"sm_86": [ROW | {"stages": "2"}]}), "row 1, stages: expected int, found str"),
        (json.dumps({"sm_86": [ROW | {"shared_kb": 0}]}), "row 1, DecodeConfig.shared_kb: expected 1 or more, found 0"),
        (json.dumps({"sm_86": [ROW | {"kernel": "simt"}]}), "row 1, DecodeConfig.spread: expected false for the SIMT"),
    ],
)
def test_rows_that_are_none_are_refused(text: str | None, error: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(KernelInputError, match=error) as raised:
        timed_rows(path)
    assert str(path) in str(raised.value)
    assert str(raised.value).endswith("Mend it, or write `{}` into it to go without timed rows.")


def test_only_weights_that_a_spread_row_may_serve_are_prepared_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is one for 8 rows; an invariant weight takes that of 16 rows, and AMD's GPUs have no such kernel."""
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"sm_86": [ROW], HIP: [asdict(replace(AMD[0], spread=True))]}))
    monkeypatch.setattr(configs, "TUNED", path)
    monkeypatch.setattr(configs, "table_of", table_of.__wrapped__)
    monkeypatch.setattr(configs, "decode_config", decode_config.__wrapped__)
    assert spreads(3, "sm_86", 128)
    assert not spreads(3, "sm_86", 128, invariant=True)
    assert not spreads(3, "sm_86", 64)
    assert not spreads(3, "sm_80", 128)
    assert not spreads(3, HIP, 128)


def test_a_row_of_the_table_can_name_the_simt_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It serves one row of x then, in groups that it was timed for, and experts keep tensor cores."""
    row = replace(SIMT, max_rows=1, min_group=128)
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"sm_86": [asdict(row)]}))
    monkeypatch.setattr(configs, "TUNED", path)
    monkeypatch.setattr(configs, "table_of", table_of.__wrapped__)
    chosen = decode_config.__wrapped__
    assert chosen(1, 3, "sm_86", 128) == row
    assert chosen(1, 3, "sm_86", -1) == row
    for rows, arch, group_size in ((2, "sm_86", 128), (1, "sm_86", 64), (1, "sm_80", 128)):
        assert chosen(rows, 3, arch, group_size).kernel == "tensor_core"
    assert chosen(1, 3, "sm_86", 128, tensor_core=True) == ADA[0]
