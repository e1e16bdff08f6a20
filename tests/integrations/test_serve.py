"""A real `vllm serve` process, asked through the OpenAI client, against logits computed without vLLM."""

import ast
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import warm_vllm
from helpers.documentation import code, commands, environment, runnable, words
from helpers.modules import ROOT

EXAMPLES = ROOT / "serving_examples"
PROMPTS = [list(range(5, 45)), [90, 17, 300, 2000, 45]]
TOKENS = 6
# float32 on both sides; vLLM's attention and norms are other kernels than transformers'.
LOGPROB_TOLERANCE = 2e-3
PROBABILITY_TOLERANCE = 1e-3  # of those printed with four decimals
START_SECONDS = 240
# Added to the command of docs/quickstart.md: a small engine, exact on the CPU, which chats.
FAST = ["--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--dtype", "float32"]
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"

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


class Server(NamedTuple):
    """A running server and a client of it."""

    process: subprocess.Popen[bytes]
    client: openai.OpenAI
    log: Path


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client


@pytest.fixture(scope="module")
def server_process(server: Server) -> subprocess.Popen[bytes]:
    return server.process


@pytest.fixture(scope="module")
def server(ssqr_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    url, log = f"http://127.0.0.1:{free_port()}", tmp_path_factory.mktemp("serve") / "log"
    vllm, *arguments = words(runnable("quickstart.md", "serve on a CPU"), {"CKPT": ssqr_pair[0]})
    command = [Path(sys.executable).with_name(vllm), *arguments, *FAST, "--chat-template", CHAT_TEMPLATE]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--served-model-name", "mini"]
    # The developer mode has the end point that reloads weights.
    environment = warm_vllm.ENVIRONMENT | warm_vllm.QUICK | {"VLLM_SERVER_DEV_MODE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=os.environ | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_healthy(process, url, log)
        yield Server(process, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), log)
    finally:
        # The engine runs in children of the server: stop the whole group. One test kills the engine, and the server
        # then ends by itself.
        for number in (signal.SIGINT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)


@pytest.fixture(scope="module")
def reference(ssqr_pair: tuple[Path, Path]) -> Any:
    """The dequantized model, in transformers."""
    return AutoModelForCausalLM.from_pretrained(ssqr_pair[1], dtype=torch.float32)


def test_completion_probabilities_match_the_dequantized_model(client: openai.OpenAI, reference: Any) -> None:
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


def test_log_has_one_line_about_the_weights(server: Server, ssqr_pair: tuple[Path, Path]) -> None:
    """28 linears of 3 bits, which a CPU multiplies dequantized, and the head, which is the embedding in float32."""
    found = re.findall(r"INFO .*\] latq quantization: (.*)", server.log.read_text())
    pattern = (
        r"latq: (\d+) matrices at (\d\.\d\d) bits in memory \(\1 by dequantize \+ matmul\); a token reads (\d.*) MB"
    )
    assert len(found) == 1
    match = re.fullmatch(pattern, found[0])
    assert match, found[0]
    assert match[1] == "16"  # q, k and v are one matrix, and so are gate and up
    assert 3.2 < float(match[2]) < 5.5
    head = 4 * 2048 * 256 / 1e6
    assert head < float(match[3]) < head + 5.5 / 8 * 3.2


def test_text_prompt_is_completed(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="mini", prompt="The list method append", max_tokens=TOKENS, temperature=0)
    assert answer.usage.completion_tokens == TOKENS
    assert answer.choices[0].text


def test_example_client(
    client: openai.OpenAI, reference: Any, ssqr_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The client prints each token of a completion with its probability."""
    prompt = "The following example shows how to"
    program = runpy.run_path(str(EXAMPLES / "openai_client.py"))
    program["main"](["--base-url", str(client.base_url), "--prompt", prompt, "--max-tokens", "4"])
    first, *lines = capsys.readouterr().out.splitlines()
    served, tokens = zip(*(line.split(maxsplit=1) for line in lines), strict=True)
    completion = "".join(ast.literal_eval(token) for token in tokens)
    assert first == f"{prompt!r} -> {completion!r}"
    tokenizer = AutoTokenizer.from_pretrained(ssqr_pair[1])
    asked, answered = (tokenizer(text)["input_ids"] for text in (prompt, completion))
    assert len(answered) == 4
    with torch.no_grad():
        probabilities = reference(torch.tensor([asked + answered])).logits[0, len(asked) - 1 : -1].softmax(-1)
    expected = [row[token].item() for row, token in zip(probabilities, answered, strict=True)]
    assert [float(probability) for probability in served] == pytest.approx(expected, abs=PROBABILITY_TOLERANCE)


def test_chat_of_the_documentation(client: openai.OpenAI) -> None:
    command = runnable("quickstart.md", "chat")
    variables = environment(URL=client.base_url)
    done = subprocess.run(["bash", "-euc", command], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_request_of_the_readme(client: openai.OpenAI) -> None:
    (request,) = (part for part in commands(code(ROOT / "README.md", "bash")) if part[0] == "curl")
    here = {"http://localhost:8000/v1/": str(client.base_url), '"OUT"': '"mini"'}
    for there, actual in here.items():
        request = [word.replace(there, actual) for word in request]
    answer = json.loads(subprocess.run([*request, "--silent"], check=True, capture_output=True).stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant", answer


def complete(client: openai.OpenAI, index: int) -> list[int]:
    """Return the greedy completion of request number `index`; every request has another prompt and length."""
    answer = client.completions.create(
        model="mini",
        prompt=[(17 * index + step) % 2000 for step in range(3 + index % 29)],
        max_tokens=1 + index % TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    return answer.choices[0].token_ids


def abandon(client: openai.OpenAI, index: int) -> None:
    """Start a long streamed completion and hang up after its first token."""
    stream = client.completions.create(
        model="mini", prompt=[index % 2000, 7], max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()


def reload_weights(client: openai.OpenAI) -> None:
    url = str(client.base_url).removesuffix("/v1/")
    body = json.dumps({"method": "reload_weights"}).encode()
    request = urllib.request.Request(f"{url}/collective_rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.status == 200


@pytest.mark.parametrize("requests", [64, pytest.param(600, marks=pytest.mark.slow)])
def test_answers_stay_the_same_under_load_aborts_and_reloads(client: openai.OpenAI, requests: int) -> None:
    """One request in three hangs up, and weights are reloaded; the other answers are those of an idle server."""
    distinct = min(requests, 32)
    quiet = [complete(client, index) for index in range(distinct)]
    with ThreadPoolExecutor(32) as pool:
        answers, aborted = {}, []
        for index in range(requests):
            answers[index] = pool.submit(complete, client, index % distinct)
            if index % 3 == 0:
                aborted.append(pool.submit(abandon, client, index))
            if index % (requests // 2) == 1:
                pool.submit(reload_weights, client).result()
        for index, answer in answers.items():
            assert answer.result() == quiet[index % distinct], index
        for request in aborted:
            request.result()


def test_killed_engine_fails_cleanly(client: openai.OpenAI, server_process: subprocess.Popen[bytes]) -> None:
    """No request hangs and the server ends, so that a supervisor restarts it. The last test: it kills.

    vLLM ends with status 0 then: a supervisor must restart it whatever its status.
    """
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(complete, client.with_options(timeout=60), index) for index in range(64)]
        os.kill(engine_of(server_process.pid), signal.SIGKILL)
        outcomes = [request.exception(timeout=90) for request in running]
    assert any(outcomes)
    assert all(outcome is None or isinstance(outcome, openai.APIError) for outcome in outcomes)
    server_process.wait(timeout=60)  # raises if it goes on without an engine


def engine_of(server: int) -> int:
    """Return the process id of the server's engine, found by the title that vLLM gives it."""
    listing = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(server)], capture_output=True, text=True, check=True
    ).stdout
    return int(next(line.split()[0] for line in listing.splitlines() if "EngineCore" in line))
