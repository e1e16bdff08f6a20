"""The table of launch configurations: what it answers is pinned, and its rows are checked."""

import hashlib
import json
from dataclasses import asdict

import pytest

from vllm_latq.kernels.configs import REGIMES, TABLE, TRITON, DecodeConfig, decode_config, max_decode_rows
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.layout.weight import HIP

UNKNOWN = "sm_130"  # stands for any architecture without a table
# sha256 of `answers`, recorded before the rows of the table were written out, when most were derived from each other.
# Whoever changes a row on purpose replaces the digest of its architectures.
ANSWERS = {
    "sm_80": "07b622592b3052e8",
    "sm_86": "dfc26596443d5d1d",
    "sm_87": "dfc26596443d5d1d",
    "sm_89": "dfc26596443d5d1d",
    "sm_90": "80164343f6713cc1" if TRITON < (3, 8) else "46f30abe7700d288",
    "sm_100": "62858e0aafd6e10f",
    "sm_103": "62858e0aafd6e10f",
    "sm_110": "62858e0aafd6e10f",
    "sm_120": "96abbdf3cad3f428",
    "sm_121": "96abbdf3cad3f428",
    "": "dfc26596443d5d1d",
    HIP: "3c4f5b2c1c470cf0",
    UNKNOWN: "c48401f1ab87c63a",
}


def answers(arch: str) -> str:
    """Return a line of JSON for every product: bits, rows, group size and the fields of its launch configuration."""
    lines = []
    for bits in (2, 3, 4, 8):
        for rows in range(1, max_decode_rows(bits) + 1):
            for group_size in (32, 64, 128, -1):
                fields = asdict(decode_config(rows, bits, arch, group_size))
                del fields["source"]
                assert not fields.pop("spread")  # not timed yet: no row may choose it
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
