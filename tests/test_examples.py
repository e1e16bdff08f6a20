"""The serving examples, run as a user would, on a checkpoint of the pipeline."""

import ast
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from engine_probe import NO_EXPERTS, OLD_VLLM
from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_latq  # noqa: F401 - makes transformers read latq checkpoints

EXAMPLES = Path(__file__).parents[1] / "serving_examples"
PROMPT = "The following example shows how to"
# A small engine that starts fast on a CPU.
SMALL = ["--enforce-eager", "--kv-cache-memory-bytes", "33554432"]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
START_SECONDS = 300
# vLLM computes in bf16 here (8 bits of mantissa), the reference in float32.
PROBABILITY_TOLERANCE = 0.02


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server(ssqr_checkpoint: Path, tmp_path: Path) -> Iterator[str]:
    """A real `vllm serve` process; its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(ssqr_checkpoint), "--max-model-len", "256"]
    log = tmp_path / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, *SMALL, "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | ENVIRONMENT,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until_healthy(process, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(url, timeout=2)
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not come up:\n{log.read_text()[-6000:]}")


def reference(checkpoint: Path, completion: str) -> list[float]:
    """Probabilities of the completion's tokens after the prompt, from transformers in float32."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt, answer = tokenizer(PROMPT)["input_ids"], tokenizer(completion)["input_ids"]
    with torch.no_grad():
        probabilities = model(torch.tensor([prompt + answer])).logits[0].softmax(-1)
    return [probabilities[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)]


@pytest.mark.engine
def test_openai_client(server: str, ssqr_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load("openai_client").main(["--base-url", server, "--prompt", PROMPT, "--max-tokens", "4"])
    lines = capsys.readouterr().out.splitlines()
    tokens = [line.split(maxsplit=1) for line in lines[1:]]
    assert len(tokens) == 4
    completion = "".join(ast.literal_eval(token) for _, token in tokens)
    assert lines[0] == f"{PROMPT!r} -> {completion!r}"
    served = [float(probability) for probability, _ in tokens]
    assert served == pytest.approx(reference(ssqr_checkpoint, completion), abs=PROBABILITY_TOLERANCE)


@pytest.mark.engine
@pytest.mark.parametrize("processes", [1, 2])
def test_offline_batch(processes: int, ssqr_checkpoint: Path) -> None:
    """On one process, and tensor-parallel on two."""
    prompts = [PROMPT, "import os\n"]
    arguments = ["--prompt", prompts[0], "--prompt", prompts[1], "--max-tokens", "6", *SMALL]
    binding = {"VLLM_CPU_OMP_THREADS_BIND": "|".join("0" * processes)}
    done = subprocess.run(
        [
            sys.executable,
            str(EXAMPLES / "offline_batch.py"),
            str(ssqr_checkpoint),
            *arguments,
            "--tensor-parallel-size",
            str(processes),
        ],
        env=os.environ | ENVIRONMENT | binding,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    answers = [line for line in done.stdout.splitlines() if " -> " in line]
    assert len(answers) == 2
    for prompt, answer in zip(prompts, answers, strict=True):
        assert re.fullmatch(re.escape(repr(prompt)) + r" -> ['\"].+['\"]", answer)


def test_lm_eval_latq(ssqr_checkpoint: Path, tasks_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--tasks", "next_word", "--include-path", str(tasks_folder), "--device", "cpu"]
    load("lm_eval_latq").main([str(ssqr_checkpoint), *arguments])
    row = next(line for line in capsys.readouterr().out.splitlines() if "next_word" in line)
    assert re.search(r"\|acc *\| *. *\| *1\.?0* *\|", row), row


@pytest.mark.engine
@pytest.mark.parametrize(
    "shape", ["tiny", pytest.param("tiny-mixture", marks=pytest.mark.skipif(OLD_VLLM, reason=NO_EXPERTS))]
)
def test_decode_latency(tmp_path: Path, shape: str) -> None:
    """A tiny model through the whole script: what it takes on a CPU says nothing, but it is a time per token."""
    engine = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 25, "max_num_batched_tokens": 256}
    arguments = ["--shape", shape, "--batch", "1", "2", "--new-tokens", "4", "--schemes", "ssqr 3 bits, 1%"]
    arguments += ["--json", str(tmp_path / "times.json")]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "decode_latency.py"), *arguments, "--engine", json.dumps(engine)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    times = json.loads((tmp_path / "times.json").read_text())["seconds_per_token"]["ssqr 3 bits, 1%"]
    assert set(times) == {"1", "2"}
    assert all(0 < seconds < 60 for seconds in times.values())
