"""The limits of multiprocessors: how many programs they hold, and what the pipes take for a warp's instructions."""

from collections import Counter

import pytest

from vllm_latq.kernels.bench.processor import MULTIPROCESSORS


@pytest.mark.parametrize(
    ("arch", "num_warps", "registers", "kb", "programs"),
    [
        ("sm_86", 2, 167, 33, 2),  # by shared memory: 34 KB of 100, with the KB that is reserved
        ("sm_86", 2, 168, 16.5, 5),
        ("sm_80", 2, 168, 16.5, 6),  # by registers: three warps of 168 on each scheduler
        ("sm_80", 4, 129, 1, 3),  # 129 registers are given out as 136
        ("sm_86", 4, 32, 0, 12),  # by warps: 48
        ("sm_86", 1, 32, 0, 16),  # by programs
        ("sm_80", 8, 255, 0, 1),
    ],
)
def test_programs_that_fit(arch: str, num_warps: int, registers: int, kb: float, programs: int) -> None:
    assert MULTIPROCESSORS[arch].resident_programs(num_warps, registers, int(kb * 1024)) == programs


@pytest.mark.parametrize(
    ("arch", "opcodes", "cycles"),
    [
        ("sm_86", {"LDS.64": 10, "FFMA": 5}, 15),  # as many as are issued
        ("sm_86", {"LOP3.LUT": 6, "SHF.R.S32.HI": 2, "PRMT": 1, "IADD3.X": 1, "LDS": 5}, 20),
        ("sm_86", {"IMAD.MOV.U32": 6, "IDP.4A.S8.S8": 2, "LDS": 5}, 16),
        ("sm_86", {"FFMA": 6, "IMAD": 4, "HFMA2.BF16_V2": 6}, 16),  # floats have two pipes
        ("sm_80", {"FFMA": 6, "IMAD": 4, "HFMA2.BF16_V2": 6}, 32),  # and share one with integer products here
        ("sm_80", {"HMMA.16816.F32.BF16": 4}, 32),
        ("sm_86", {"HMMA.16816.F32.BF16": 4, "HMMA.1688.F32": 2}, 80),
        ("sm_86", {"IMMA.16832.S8.S8.SAT": 4}, 64),
        ("sm_90", {"HGMMA.64x64x16.F32.BF16": 1}, 32),
        ("sm_90", {"UIADD3": 3, "ULEA": 1}, 4),  # instructions of a whole warp have a pipe of their own
    ],
)
def test_cycles_of_the_busiest_pipe(arch: str, opcodes: dict[str, int], cycles: float) -> None:
    assert MULTIPROCESSORS[arch].cycles(Counter(opcodes)) == cycles
