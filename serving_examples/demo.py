"""Quantize the bundled model by every method, print size and loss of each, then serve one with `vllm serve`.

    python serving_examples/demo.py [--model DIR] [--bits 4 3 2] [--processes N] [--no-serve]

Methods run side by side, one thread each. Every number is measured in this run. Checkpoints stay in demo-output/.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import torch
from openai import OpenAI

from vllm_latq.cli.inspect import inspect_checkpoint
from vllm_latq.console import print_table
from vllm_latq.quantize.evaluation.evaluate import Evaluation, evaluate
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.plan import plan
from vllm_latq.quantize.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
PROMPT = "The following example shows how to open a file and"
# 128 weights share a scale of 16 bits, so 4-bit codes take 4.125 bits per weight.
SCALE_BITS = 16 / 128
START_SECONDS = 300.0
METHODS = ("rtn", "gptq", "ssqr", "hptq", "hrtn", "latq", "latq+")
CALIBRATION = {"num_samples": 256, "seq_len": 256}


def main() -> None:
    """Print the table of the methods, then a completion by a server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DATA / "pydoc-mini", help="original model directory")
    parser.add_argument("--calibration", default=str(DATA / "calibration.txt"), help="calibration text")
    parser.add_argument("--text", default=str(DATA / "evaluation.txt"), help="held-out text")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "demo-output", help="folder for checkpoints; replaced if it exists"
    )
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2], help="code widths")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), help="methods at once (default: one per core)"
    )
    parser.add_argument("--no-serve", action="store_true", help="only print the table")
    options = parser.parse_args()
    shutil.rmtree(options.output, ignore_errors=True)
    columns = ("method", "bits per weight", "in memory", "KL to bf16", "top-1 agreement", "perplexity", "bytes")
    print_table(f"{options.model.name}: {Path(options.text).name}, windows of 256 tokens", columns, measured(options))
    if not options.no_serve:
        print(completion(options.output / f"ssqr-{options.bits[0]}"))


def measured(options: argparse.Namespace) -> list[tuple[str, ...]]:
    """Quantize and evaluate by every method and width, one thread per process; return the rows of the table.

    The longest runs start first.
    """
    # Spawn, do not fork: a process forked after torch started threads may wait for those threads for ever.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, context, initializer=torch.set_num_threads, initargs=(1,)) as workers:
        found: dict[tuple[str, int], Future[tuple[str, ...]]] = {}
        for name in ("latq+", "latq", "ssqr", "hptq", "hrtn", "gptq", "rtn"):
            for bits in options.bits:
                found[name, bits] = workers.submit(run, name, bits, recipe(name, bits), options)
        baseline = workers.submit(row, "bf16", None, options.model, options)
        return [baseline.result(), *(found[name, bits].result() for bits in options.bits for name in METHODS)]


def recipe(name: str, bits: int) -> Recipe:
    """Return the recipe of a method at about the stored size of `bits`-bit codes with group scales.

    latq has a tenth of a bit more than the codes, and latq+ half a bit more than that, which is what ssqr takes. The
    head stays as it is with all of them.
    """
    if name in ("latq", "latq+"):
        return Recipe("latq", bits=round(bits + 0.1 + 0.5 * (name == "latq+"), 1), ignore=("lm_head",), **CALIBRATION)
    if name in ("hptq", "hrtn"):
        return Recipe(name, bits=bits + SCALE_BITS, **CALIBRATION)
    return Recipe(name, bits, **CALIBRATION)


def run(name: str, bits: int, chosen: Recipe, options: argparse.Namespace) -> tuple[str, ...]:
    """Quantize the model and return its row of the table."""
    checkpoint = options.output / f"{name}-{bits}"
    print(f"quantizing: {name}, {bits} bits", file=sys.stderr, flush=True)
    quantize_checkpoint(chosen, options.model, checkpoint, calibration=options.calibration)
    return row(name, bits, checkpoint, options)


def row(name: str, bits: int | None, model: Path, options: argparse.Namespace) -> tuple[str, ...]:
    """Evaluate a checkpoint, or the original where bits is None, and return its row of the table."""
    baseline = None if bits is None else options.model
    result: Evaluation = evaluate(model, options.text, seq_len=256, baseline=baseline, batch_size=16, dtype="float32")
    if bits is None:
        return name, "16", "16", "0", "1", f"{result.perplexity:.3f}", f"{bf16_bytes(options):,}"
    summary = inspect_checkpoint(model)
    label = {"ssqr": f"ssqr {bits} 1%", "latq": f"latq {bits}.1", "latq+": f"latq {bits}.6"}.get(name, f"{name} {bits}")
    return (
        label,
        f"{summary['bits_per_weight']:.3f}",
        f"{summary['served_bits_per_weight']:.3f}",
        f"{result.kl:.2e}",
        f"{result.top1_agreement:.4f}",
        f"{result.perplexity:.3f}",
        f"{summary['bytes']:,}",
    )


def bf16_bytes(options: argparse.Namespace) -> int:
    """Return the bytes in bf16 of the linears that the methods quantize."""
    return 2 * plan(Recipe("rtn", 4), options.model)["totals"]["weights"]


def completion(checkpoint: Path) -> str:
    """Serve a checkpoint with `vllm serve`, ask for a completion, stop the server, and return both as JSON."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    limits = ["--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "256"]
    if not shutil.which("nvidia-smi"):
        limits += ["--enforce-eager", "--kv-cache-memory-bytes", "33554432"]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint), "--quantization", "latq"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo", *limits]
    print("serving:", " ".join(command[1:3]), file=sys.stderr)
    log = checkpoint.parent / "server.log"
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until_healthy(server, port, log)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        answer = client.completions.create(model="demo", prompt=PROMPT, max_tokens=24, temperature=0)
        return json.dumps({"served": str(checkpoint.name), "prompt": PROMPT, "completion": answer.choices[0].text})
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Poll the server's health page. Raise SystemExit with the end of its log if it ends or takes too long."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2)
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"vllm serve did not start; the end of {log.name}:\n{log.read_text()[-3000:]}")


if __name__ == "__main__":
    main()
