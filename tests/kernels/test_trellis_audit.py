"""Gates on the machine code of the trellis kernels, compiled ahead of time in a subprocess; no GPU."""

import json
import os
import subprocess
import sys

import pytest

from helpers.slow import slow

pytestmark = pytest.mark.compiler

# Instructions per weight of the main loop, by rows and bits. Counted with Triton 3.9 on sm_80, sm_86 and sm_90: 2.03 to
# 2.07, 2.96 to 3.02 and 2.62 to 2.70 at 4 rows; 2.39 to 2.47, 3.40 to 3.55 and 3.06 to 3.14 at 8.
CEILINGS = {
    (4, 2): 2.1, (4, 3): 3.06, (4, 4): 2.74, (8, 2): 2.52, (8, 3): 3.62, (8, 4): 3.2,
}  # fmt: skip
# One architecture for each number of rows and bits, because compiling takes seconds; the last is of routed experts.
CASES = [
    ("sm_80", 8, 2, False), ("sm_86", 8, 3, False), ("sm_90", 8, 4, False),
    ("sm_90", 4, 2, False), ("sm_80", 4, 3, False), ("sm_86", 4, 4, False),
    ("sm_90", 8, 3, True),
]  # fmt: skip
SCRIPT = """
import json, sys
from vllm_latq.kernels.dev.audit import audit_trellis, audit_trellis_others
audits = [audit_trellis(arch, (2 * bits,), rows, grouped) for arch, rows, bits, grouped in json.loads(sys.argv[1])]
audits += [audit_trellis("sm_80", (4, 7), 16), *audit_trellis_others("sm_86")] if len(sys.argv) > 2 else []
print(json.dumps([{
    **vars(audited.row),
    "exchanges": sum(n for name, n in audited.loop.items() if name.startswith(("STS", "SHFL"))),
    "integer_products": sum(n for name, n in audited.loop.items() if name.startswith("IMMA")),
} for audited in audits]))
"""


@pytest.mark.parametrize(
    ("cases", "others"), [(CASES[:2], ()), *slow([(CASES[2:], ("others",))])], ids=["two", "the rest"]
)
def test_main_loops(cases: list[tuple[str, int, int, bool]], others: tuple[str, ...]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(cases), *others]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["spill_bytes"] for row in rows] == [0] * len(rows)
    for (_, activations, bits, _), row in zip(cases, rows, strict=False):
        assert row["sass_per_weight"] <= CEILINGS[activations, bits]
        assert row["exchanges"] == 0  # bytes go from where they are hashed to the tensor cores
        assert row["integer_products"] > 0
        assert row["registers"] <= 65536 // (64 * 4)  # four programs of two warps on a multiprocessor
