"""A real `vllm serve` process, asked through the OpenAI client, against logits computed without vLLM."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

PROMPTS = [list(range(5, 45)), [90, 17, 300, 2000, 45]]
TOKENS = 6
# float32 on both sides; vLLM's attention and norms are other kernels than transformers'.
LOGPROB_TOLERANCE = 2e-3
START_SECONDS = 240
FAST = [
    *("--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"),
    *("--kv-cache-memory-bytes", str(1 << 25), "--dtype", "float32"),
]

pytestmark = pytest.mark.engine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server stopped:\n{log.read_text()[-6000:]}"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.25)
    raise AssertionError(f"no answer after {START_SECONDS} s:\n{log.read_text()[-6000:]}")


@pytest.fixture(scope="module")
def client(ssqr_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    url, log = f"http://127.0.0.1:{free_port()}", tmp_path_factory.mktemp("serve") / "log"
    command = [Path(sys.executable).with_name("vllm"), "serve", ssqr_pair[0], "--quantization", "latq", *FAST]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--served-model-name", "mini"]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    quick = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=os.environ | offline | quick,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_healthy(process, url, log)
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    finally:
        # The engine runs in children of the server: stop the whole group.
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def reference(ssqr_pair: tuple[Path, Path]) -> Any:
    """The dequantized model, in transformers."""
    return AutoModelForCausalLM.from_pretrained(ssqr_pair[1], dtype=torch.float32)


def test_completions_have_the_probabilities_of_the_dequantized_model(client: openai.OpenAI, reference: Any) -> None:
    answer = client.completions.create(
        model="mini",
        prompt=PROMPTS,
        max_tokens=TOKENS,
        temperature=0,
        logprobs=1,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    for prompt, choice in zip(PROMPTS, sorted(answer.choices, key=lambda choice: choice.index), strict=True):
        ids = torch.tensor([prompt + choice.token_ids])
        with torch.no_grad():
            logprobs = reference(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert choice.token_ids == logprobs.argmax(-1).tolist()
        expected = logprobs.max(-1).values
        torch.testing.assert_close(
            torch.tensor(choice.logprobs.token_logprobs), expected, rtol=0, atol=LOGPROB_TOLERANCE
        )


def test_a_text_prompt_is_completed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="mini", prompt="The list method append", max_tokens=TOKENS, temperature=0)
    assert answer.usage.completion_tokens == TOKENS
    assert answer.choices[0].text
