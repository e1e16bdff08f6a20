"""The serving examples, run as the documentation prints them, on a checkpoint of the pipeline.

The clients are in test_serve.py.
"""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from helpers import warm_vllm
from helpers.documentation import runnable, words
from helpers.engine_probe import NO_EXPERTS, OLD_VLLM
from helpers.modules import ROOT
from helpers.programs import program
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.integrations.vllm.dummy import dummy_weight

EXAMPLES = ROOT / "serving_examples"
SCHEME = "ssqr 3 bits, 1%"
VLLM_SCHEME = "marlin 4 bits"


@pytest.mark.engine
@pytest.mark.parametrize("processes", [1, 2])
def test_offline_batch(processes: int, ssqr_checkpoint: Path) -> None:
    """Runs as docs/serve.md prints it, and tensor-parallel on two processes."""
    printed_command = words(runnable("serve.md", "offline_batch"), {"CKPT": ssqr_checkpoint})
    assert printed_command[:2] == ["python", "serving_examples/offline_batch.py"]
    prompts = ["import os", "The module"]
    arguments = [str(ROOT / printed_command[1]), *printed_command[2:], "--tensor-parallel-size", str(processes)]
    status, printed = warm_vllm.run(program("forked_workers.py"), *arguments, **warm_vllm.QUICK)
    assert status == 0, printed[-6000:]
    answers = [line for line in printed.splitlines() if line.startswith(tuple(f"{prompt!r} -> " for prompt in prompts))]
    assert len(answers) == 2
    for prompt, answer in zip(prompts, answers, strict=True):
        assert re.fullmatch(re.escape(repr(prompt)) + r" -> ['\"].+['\"]", answer)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")  # lm_eval does, in its own code
def test_lm_eval_latq(ssqr_checkpoint: Path, tasks_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs as docs/evaluate.md prints it, also on a machine without CUDA."""
    task = f"next_word --include-path {tasks_folder}"
    _, example, *arguments = words(runnable("evaluate.md", "lm_eval"), {"CKPT": ssqr_checkpoint, "TASK": task})
    runpy.run_path(str(ROOT / example))["main"](arguments)
    row = next(line for line in capsys.readouterr().out.splitlines() if "next_word" in line)
    assert re.search(r"\|acc *\| *. *\| *1\.?0* *\|", row), row


def decode_latency(*arguments: str) -> str:
    """Return what the script prints on a tiny model. The times of a CPU mean nothing, but they are times per token."""
    engine = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 25, "max_num_batched_tokens": 256}
    arguments += ("--batch", "1", "2", "--new-tokens", "32", "--engine", json.dumps(engine))
    status, printed = warm_vllm.run(EXAMPLES / "decode_latency.py", *arguments, **warm_vllm.QUICK)
    assert status == 0, printed[-6000:]
    return printed


def assert_times(times: dict[str, float], spread: dict[str, list[float]]) -> None:
    assert set(times) == set(spread) == {"1", "2"}
    for batch, seconds in times.items():
        fastest, slowest = spread[batch]
        assert fastest <= seconds <= slowest
        # 31 more tokens than the run whose time is taken off: a single run may be disturbed, half of five are not.
        assert 0 < seconds < 60


def test_configurations_are_those_of_the_format() -> None:
    schemes = runpy.run_path(str(EXAMPLES / "decode_latency.py"))["schemes"]()
    ours = [CheckpointConfig.from_dict(schemes[name]) for name in schemes if name.startswith(("ssqr", "latq"))]
    assert [config.scheme.encoding for config in ours] == ["packed"] * 4 + ["trellis"] * 3
    assert dummy_weight(ours[-1].scheme, 64, 256, ours[-1].recipe).shape == (64, 256)


def test_time_per_token() -> None:
    per_token = runpy.run_path(str(EXAMPLES / "decode_latency.py"))["per_token"]
    assert per_token([3.0, 1.0, 7.0], [13.0, 23.0], 10) == [1.0, 2.0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cpu_products(dtype: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    threads, program = torch.get_num_threads(), runpy.run_path(str(EXAMPLES / "cpu_products.py"))
    monkeypatch.setitem(program["main"].__globals__, "COPIES", 1)
    try:
        program["main"](["--dtype", dtype, "--tokens", "1", "3", "--repeats", "1"])
    finally:
        torch.set_num_threads(threads)
    rows = re.findall(r"^[13] +(.*)$", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(rows) == 2
    for row in rows:
        times = [float(time) for time in row.split()]
        assert len(times) == 4, "unquantized, ssqr, invariant, latq"
        assert min(times) > 0


def has_int4_product() -> bool:
    """Return whether this vLLM has an operator for its own 4-bit scheme; its CPU build has one for AVX512 only."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # the library built for this processor
    return not current_platform.is_cpu() or hasattr(torch.ops._C, "cpu_gemm_wna16")


@pytest.mark.engine
def test_decode_latency_of_several_schemes(tmp_path: Path) -> None:
    """All engines start together and are measured in turn; a scheme that cannot run is reported and left out."""
    results, schemes = tmp_path / "times.json", ["bf16", VLLM_SCHEME, SCHEME]
    printed = decode_latency("--shape", "tiny", "--schemes", *schemes, "--together", "--json", str(results))
    measured = [scheme for scheme in schemes if scheme != VLLM_SCHEME or has_int4_product()]
    failed = re.findall(r"^(.+): not measured:$", printed, flags=re.MULTILINE)
    assert failed == [scheme for scheme in schemes if scheme not in measured]
    found = json.loads(results.read_text())
    assert list(found["seconds_per_token"]) == list(found["spread"]) == measured
    for scheme in measured:
        assert_times(found["seconds_per_token"][scheme], found["spread"][scheme])


@pytest.mark.engine
@pytest.mark.skipif(OLD_VLLM, reason=NO_EXPERTS)
def test_decode_latency_of_a_mixture(tmp_path: Path) -> None:
    """The script measures a scheme in a process of its own; this is the scheme with a quantized head."""
    times = tmp_path / "times.json"
    decode_latency("--shape", "tiny-mixture", "--measure", f"{SCHEME}, head 4 bits", "--json", str(times))
    found = json.loads(times.read_text())
    assert_times(found["seconds_per_token"], found["spread"])
