"""Gates on the machine code, compiled ahead of time for each architecture, in a subprocess; no GPU."""

import json
import os
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import triton

from helpers.slow import slow
from vllm_latq.kernels.configs import REGIMES, decode_config, max_decode_rows
from vllm_latq.kernels.layout.weight import HIP

pytestmark = pytest.mark.compiler

# Instructions per weight at 8 rows or fewer, group size 128, outliers and split-K compiled in. Counted with Triton 3.9:
# 1.18-1.22, 1.34-1.40 and 1.46-1.52; the ceilings leave 5% for another compiler. They include the removal of the bias,
# which needs no launch of its own. Tiles with 32 features for a warp take more (sm_80: 1.35, 1.54 and 1.63; Hopper:
# 1.49, 1.61 and 1.70), and let more warps run.
CEILINGS = {2: 1.29, 3: 1.47, 4: 1.61}
NARROW_CEILINGS = {"sm_80": {2: 1.42, 3: 1.63, 4: 1.73}, "sm_90": {2: 1.52, 3: 1.74, 4: 1.85}}
LEAST_WARPS = {"sm_80": {8: 16, 16: 12, 32: 12}, "sm_86": {8: 8, 16: 12, 32: 8}}  # that a multiprocessor holds
WIDER = {
    ("sm_80", 16): 2.03, ("sm_86", 32): 2.75, ("sm_86", 64): 3.9, ("sm_90", 32): 3.0, ("sm_100", 16): 1.67,
    ("sm_120", 16): 2.05,
}  # 3 bits, counted: 1.93, 2.62, 3.72, 2.81, 1.64 and 1.95  # fmt: skip
MIDRISE_CEILING = 0.08  # what a mid-rise grid may add to the ceiling; counted: 1.21, 1.42 and 1.56
FEW_BYTES = 24  # that other variants may spill, once, outside their loop
MOST_BYTES = {("ssqr_tensor_core", "sm_100", 3, 64): 32}
WARPS_TOLERANCE = 0.5  # they depend on registers
STATED_TOLERANCE = 0.05  # counts differ with the version of ptxas; registers more, so those are not compared
REGISTERS = 65536  # of a multiprocessor
SHARED_LIMIT = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10,
    "sm_120": 99 << 10,
}  # fmt: skip

# (architecture, bits, rows, activations, group size; and whether the grid is mid-rise, the kernel that of experts;
# ranges of columns).
# Rows below zero stand for the SIMT kernel of so many, none for the kernels that do not depend on the rows: with bits,
# dequantization; without, the load-time kernels.
LOW_BATCH = [(arch, bits, 8, "*bf16", 128) for arch in SHARED_LIMIT for bits in CEILINGS]
# Kernels of their own: one row, and two, which gather x.
FEWEST = [(arch, bits, m, "*bf16", 128) for arch, bits, m in (("sm_80", 3, 1), ("sm_80", 3, 2), ("sm_86", 4, 2),
          ("sm_90", 2, 1), ("sm_90", 3, 1), ("sm_90", 4, 2), ("sm_120", 4, 1))]  # fmt: skip
IN_RANGES = [
    (arch, bits, m, "*bf16", 128, False, False, ranges)
    for arch, bits, m, ranges in (("sm_80", 3, 1, 8), ("sm_86", 2, 4, 2), ("sm_90", 3, 1, 4), ("sm_120", 4, 2, 4))
]  # fmt: skip
WIDE = [(arch, 3, rows, "*bf16", 128) for arch, rows in WIDER]
MIDRISE = [
    *(("sm_80", bits, 8, "*bf16", 128, True) for bits in CEILINGS),
    ("sm_86", 2, 32, "*bf16", 128, True),
    ("sm_80", 4, 64, "*bf16", -1, True),
    ("sm_90", 3, 64, "*bf16", -1, True, True),
]
GROUPED = [("sm_80", 3, 8, "*bf16", 128, False, True), ("sm_90", 3, 32, "*bf16", 128, False, True)]
# Where the compiler could take tcgen05, and would make nothing of some.
BLACKWELL = [
    ("sm_100", 4, 64, "*bf16", 32),
    ("sm_100", 8, 32, "*bf16", 64),
    ("sm_103", 3, 32, "*bf16", 128),
    ("sm_110", 2, 16, "*fp16", 32),
]
OTHERS = [
    ("sm_80", 3, 8, "*fp16", 128),
    ("sm_80", 4, 8, "*bf16", -1),
    ("sm_80", 3, 8, "*bf16", 32),
    ("sm_80", 2, 16, "*bf16", 64),
    ("sm_86", 3, 32, "*bf16", 32),
    ("sm_86", 4, 64, "*bf16", 32),
    ("sm_86", 8, 8, "*bf16", 32),
    ("sm_86", 8, 32, "*bf16", 32),
    ("sm_90", 8, 32, "*bf16", 32),
    ("sm_90", 4, 32, "*bf16", 128),
    ("sm_90", 8, 8, "*bf16", 128),
    ("sm_86", 4, -1, "*bf16", 128),
    ("sm_86", 3, -1, "*bf16", -1, True),
    ("sm_80", 3, -4, "*bf16", 128),
    ("sm_90", 8, -8, "*bf16", 128),
    ("sm_80", 3, 0, "*bf16", 128),
    ("sm_90", 0, 0, "*bf16", 128),
]

# The other cases are slow: compiling one takes seconds.
QUICK = {
    *(("sm_86", bits, 8, "*bf16", 128) for bits in CEILINGS),
    ("sm_80", 3, 8, "*bf16", 128),
    ("sm_90", 3, 8, "*bf16", 128),
    ("sm_80", 3, 1, "*bf16", 128),
    ("sm_86", 2, 4, "*bf16", 128, False, False, 2),
    ("sm_86", 3, 32, "*bf16", 128),
    ("sm_80", 3, 8, "*bf16", 128, True),
    ("sm_80", 3, 8, "*bf16", 128, False, True),
    ("sm_80", 3, 8, "*fp16", 128),
    ("sm_86", 3, 32, "*bf16", 32),
    ("sm_86", 8, 8, "*bf16", 32),
    ("sm_86", 4, -1, "*bf16", 128),
    ("sm_80", 3, 0, "*bf16", 128),
    ("sm_90", 0, 0, "*bf16", 128),
}
EVERY = {*LOW_BATCH, *FEWEST, *IN_RANGES, *WIDE, *GROUPED, *MIDRISE, *BLACKWELL, *OTHERS}
IN_FLIGHT = ("sm_86", 3, 32, "*bf16", 128)

SCRIPT = """
import json, sys
from vllm_latq.kernels.dev.audit import audit_decoding, audit_dequantize, audit_dequantized_outliers
from vllm_latq.kernels.dev.audit import audit_simt, audit_tensor_core
from vllm_latq.kernels.configs import decode_config
from vllm_latq.kernels.decode.launch import Variant

def together(code):
    # Most loads of four activations that a loop has on their way before it adds the first.
    most = 0
    for first, last in code.loops():
        waiting = 0
        for _, name, _ in code.instructions[first : last + 1]:
            waiting = 0 if name.startswith("FFMA") else waiting + name.startswith("LDG.E.64")
            most = max(most, waiting)
    return most


def bytes_loaded(loop):
    # Bytes per thread and trip that asynchronous copies load, by the size of a copy: 16, 8 or 4 bytes.
    loaded = {16: 0, 8: 0, 4: 0}
    for name, n in loop.items():
        if name.startswith("LDGSTS"):
            size = 16 if ".128" in name else 8 if ".64" in name else 4
            loaded[size] += size * n
    return dict(zip(("wide", "middle", "narrow"), loaded.values()))


found = []
for arch, bits, rows, activations, group, *flags in json.loads(sys.argv[1]):
    midrise, grouped, ranges = [*flags, *(False, False, 1)[len(flags) :]]
    variant = Variant(bits, abs(rows), group, midrise, ranges=ranges, split=ranges == 1)
    if rows < 0:
        audited = audit_simt(arch, variant)
    elif rows == 0 and bits:
        audited = audit_dequantize(arch, bits)
    elif rows == 0:
        others = [audit(arch) for audit in (audit_dequantized_outliers, audit_decoding)]
        audited = max(others, key=lambda other: other.row.spill_bytes)
    else:
        config = decode_config(rows, bits, arch, group)
        audited = audit_tensor_core(arch, config, variant, activations, grouped)
    loop = audited.loop
    found.append({
        **vars(audited.row),
        "shared_stores": sum(n for name, n in loop.items() if name.startswith(("STS", "STSM"))),
        "plain_loads": sum(n for name, n in loop.items() if name.startswith("LDG.")),
        **bytes_loaded(loop),
        "matrix": sum(n for name, n in loop.items() if name.startswith(("HMMA", "HGMMA"))),
        "together": together(audited.code),
        "spilled_in_loop": sum(n for name, n in loop.items() if name.startswith(("LDL", "STL"))),
    })
print(json.dumps(found))
"""


DEPENDENT_SCRIPT = """
import json
from vllm_latq.kernels.configs import decode_config
from vllm_latq.kernels.decode.launch import Variant
from vllm_latq.kernels.dev.audit import WAIT, audit_dependent, audit_tensor_core
found = []
for rows in (1, 8):
    config = decode_config(rows, 3, "sm_90")
    for audit in (audit_dependent, audit_tensor_core):
        audited = audit("sm_90", config, Variant(3, rows))
        before, names = audited.code.memory_before(WAIT), [name for _, name, _ in audited.code.instructions]
        prefetches = sum(n for name, n in before.items() if ".PF2" in name)
        start = names.index("PREEXIT") if "PREEXIT" in names else -1
        found.append([audited.code.count(WAIT), prefetches, before.total() - prefetches, start,
                      audited.row.spill_bytes, config.stages])
print(json.dumps(found))
"""


AMD_SCRIPT = """
import json
from triton.backends.compiler import GPUTarget
from vllm_latq.kernels.dev.audit import compile_kernel
from vllm_latq.kernels.configs import HIP, decode_config
from vllm_latq.kernels.decode.launch import Variant
from vllm_latq.kernels.decode.ssqr import ssqr_constants, ssqr_tensor_core
found = []
for bits, rows, group in ((3, 8, 128), (3, 8, 32), (8, 8, 64), (4, 64, 128), (8, 32, 128)):
    config = decode_config(rows, bits, HIP, group)
    values = ssqr_constants(config, Variant(bits, config.max_rows, group, asm=False))
    found.append(compile_kernel(ssqr_tensor_core, GPUTarget("hip", "gfx942", 64), values, config.num_warps))
print(json.dumps([{"shared_bytes": c.metadata.shared, "matrix": c.asm["amdgcn"].count("v_mfma")} for c in found]))
"""


def run_compiler(*arguments: str) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ceilings(arch: str) -> dict[int, float]:
    return NARROW_CEILINGS.get(arch, CEILINGS)


@pytest.fixture(scope="module")
def audited(request: pytest.FixtureRequest) -> dict[tuple, dict]:
    """The cases of this run, compiled in one process."""
    parameters = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    asked = {values["case"] for values in parameters if values.get("case") in EVERY}
    cases = sorted(asked | {IN_FLIGHT}, key=str)
    return dict(zip(cases, run_compiler("-c", SCRIPT, json.dumps(cases)), strict=True))


def marked(cases: list[tuple]) -> list[Any]:
    return [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize("case", marked(LOW_BATCH + FEWEST + IN_RANGES + WIDE + GROUPED), ids=str)
def test_gates(audited: dict[tuple, dict], case: tuple) -> None:
    arch, bits, rows, _, group_size, *_ = case
    config, row = decode_config(rows, bits, arch, group_size), audited[case]
    assert row["sass_per_weight"] <= (ceilings(arch)[bits] if rows <= 8 else WIDER[arch, rows])
    assert row["spill_bytes"] == 0
    assert row["shared_stores"] == 0  # neither dequantized weights nor activations pass through registers on their way
    assert row["plain_loads"] == 0
    brought = row["wide"] + (row["middle"] if rows <= 8 else 0)  # by copies of 16 bytes, and of 8 (`tiles.by_four`)
    assert brought >= 0.9 * (row["wide"] + row["middle"] + row["narrow"])
    assert row["wide"] >= config.block_n * bits / config.num_warps  # the weights, of a thread
    assert row["matrix"] > 0
    assert row["shared_bytes"] <= SHARED_LIMIT[arch]
    assert row["warps"] >= LEAST_WARPS.get(arch, {}).get(config.max_rows, 0)


@pytest.mark.parametrize("case", marked(LOW_BATCH + FEWEST + WIDE + [case for case in OTHERS if case[2] >= 8]), ids=str)
def test_as_many_programs_fit_as_split_k_counts_on(audited: dict[tuple, dict], case: tuple) -> None:
    arch, bits, rows, _, group_size = case
    config, row = decode_config(rows, bits, arch, group_size), audited[case]
    assert row["shared_bytes"] <= config.shared_bytes(bits, group_size)
    registers = -(-row["registers"] // 8) * 8 * 32 * config.num_warps  # given to warps in eights
    assert config.programs(bits, group_size) * registers <= REGISTERS


@pytest.mark.parametrize("case", marked(BLACKWELL), ids=str)
def test_products_are_ampere_s(audited: dict[tuple, dict], case: tuple) -> None:
    """At least as many as the weights and rows take: 16 x 16 weights by 8 rows each, shared out to the warps."""
    arch, bits, rows, _, group_size = case
    config, row = decode_config(rows, bits, arch, group_size), audited[case]
    assert row["matrix"] >= config.block_n // 16 * 16 * (rows // 8) * (2 if bits == 8 else 1) // config.num_warps
    assert row["shared_stores"] == row["plain_loads"] == 0


@pytest.mark.parametrize("arch", [*SHARED_LIMIT, HIP, "sm_130"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_entry_fits_into_shared_memory(arch: str, bits: int) -> None:
    """By the arithmetic that the test above holds against the compiler. sm_130 stands for what has no table."""
    limit = SHARED_LIMIT.get(arch, (64 if arch == HIP else 99) << 10)
    for rows in (rows for rows in REGIMES if rows <= max_decode_rows(bits)):
        for group_size in (32, 64, 128, -1):
            assert decode_config(rows, bits, arch, group_size).shared_bytes(bits, group_size) <= limit


@pytest.mark.parametrize("case", marked(MIDRISE), ids=str)
def test_mid_rise_grids(audited: dict[tuple, dict], case: tuple) -> None:
    row = audited[case]
    assert row["spilled_in_loop"] == row["shared_stores"] == row["plain_loads"] == 0
    assert row["spill_bytes"] <= FEW_BYTES
    assert row["shared_bytes"] <= SHARED_LIMIT[case[0]]
    if case[2] == 8:
        assert row["sass_per_weight"] <= ceilings(case[0])[case[1]] + MIDRISE_CEILING


def test_all_activations_of_a_turn_are_asked_for_before_one_is_added(audited: dict[tuple, dict]) -> None:
    """A thread asks for the activations of 16 outliers at once. Asked for one by one, 3 to 4 were on their way."""
    assert audited[IN_FLIGHT]["together"] == 16


@pytest.mark.parametrize("case", marked(OTHERS), ids=str)
def test_other_variants_do_not_spill_in_their_loop(audited: dict[tuple, dict], case: tuple) -> None:
    row = audited[case]
    assert row["spilled_in_loop"] == 0
    assert row["spill_bytes"] <= FEW_BYTES
    assert row["shared_bytes"] <= SHARED_LIMIT[case[0]]
    if case[2] > 0:
        assert row["shared_stores"] == row["plain_loads"] == 0


@pytest.mark.slow
def test_a_dependent_launch_waits_after_it_has_asked_for_words() -> None:
    """Only words of the weight are touched before the wait; without the option there is no wait."""
    for row, dependent in zip(run_compiler("-c", DEPENDENT_SCRIPT), (True, False, True, False), strict=True):
        waits, prefetches, others, start, spilled, stages = row
        assert waits == dependent
        assert spilled == 0
        if dependent:
            assert prefetches == 3 * stages  # a sector of each row in each of three planes
            assert others == 0
            assert start >= 0
        else:
            assert start == -1


def stated_cells() -> dict[tuple[str, str, int, int], tuple[float, float, int, int, int]]:
    """(kernel, architecture, bits, rows) -> instructions, cycles, warps, shared KB, spilled bytes, as documented."""
    lines = (Path(__file__).parents[2] / "docs" / "performance.md").read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("| kernel | bits | rows | sm_80")]
    counts, cycles, warps, _registers, shared, spilled = tables = ({}, {}, {}, {}, {}, {})
    for found, start in zip(tables, starts, strict=True):
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in takewhile(str.strip, lines[start:])]
        for kernel, bits, rows, *cells in table[2:]:
            for arch, cell in zip(table[0][3:], cells, strict=True):
                found[kernel, arch, int(bits.replace("any", "0")), int(rows.replace("any", "0"))] = float(cell)
    # The last table leaves out kernels that spill nowhere.
    return {
        key: (count, cycles[key], int(warps[key]), int(shared[key]), int(spilled.get(key, 0)))
        for key, count in counts.items()
    }


@pytest.mark.skipif(not triton.__version__.startswith("3.9"), reason="the table is of Triton 3.9")
@pytest.mark.parametrize(("arch", "bits"), [(("sm_86",), ("3",)), *slow([(tuple(SHARED_LIMIT), ("2", "3", "4", "8"))])])
def test_documentation_has_the_tables_that_the_command_prints(arch: tuple[str, ...], bits: tuple[str, ...]) -> None:
    """And so every kernel has a ceiling of instructions and of spilled bytes."""
    keys = {
        "kernel", "arch", "bits", "max_rows", "sass_per_weight", "cycles_per_weight", "warps", "registers",
        "spill_bytes", "shared_bytes",
    }  # fmt: skip
    rows = run_compiler("-m", "vllm_latq.kernels.dev.audit", "--json", "--arch", *arch, "--bits", *bits)
    stated = {key: cell for key, cell in stated_cells().items() if key[1] in arch and str(key[2]) in (*bits, "0")}
    assert {(row["kernel"], row["arch"], row["bits"], row["max_rows"]) for row in rows} == stated.keys()
    for row in rows:
        assert set(row) == keys
        cell = (row["kernel"], row["arch"], row["bits"], row["max_rows"])
        count, cycles, warps, shared, spilled = stated[cell]
        assert row["sass_per_weight"] == pytest.approx(count, rel=STATED_TOLERANCE), cell
        assert row["cycles_per_weight"] == pytest.approx(cycles, rel=STATED_TOLERANCE), cell
        assert row["warps"] == pytest.approx(warps, rel=WARPS_TOLERANCE), cell
        assert row["shared_bytes"] == pytest.approx(1024 * shared, abs=512), cell
        assert row["spill_bytes"] == pytest.approx(spilled, abs=FEW_BYTES), cell
        assert row["spill_bytes"] <= MOST_BYTES.get(cell, FEW_BYTES), cell


@pytest.mark.slow
def test_amd_fits_in_shared_memory() -> None:
    """And multiplies by matrix instructions, in small groups, too. No inline assembly is compiled for AMD."""
    for compiled in run_compiler("-c", AMD_SCRIPT):
        assert compiled["shared_bytes"] <= 64 << 10
        assert compiled["matrix"] > 0
