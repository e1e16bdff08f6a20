"""Runs shared by several processes on the CPU, started by the real torchrun and as it starts them: one's result."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import forked
from vllm_latq.console import short_name
from vllm_latq.errors import ConfigError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import KV_SCALES, verify
from vllm_latq.quantize.allocation.model_lattice import ModelLattice
from vllm_latq.quantize.calibration.hessian import InputHessian
from vllm_latq.quantize.lattice.grams import SharedInput
from vllm_latq.quantize.machine.distributed import World
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

SAMPLES = {"num_samples": 7, "seq_len": 32}
# With all that is stored beside the linears.
GPTQ = Recipe("gptq", 4, group_size=16, ignore=(), embedding_bits=8, kv_cache_scheme="fp8", **SAMPLES)
HPTQ = Recipe("hptq", bits=3.5, **SAMPLES)
LATQ = Recipe("latq", bits=3.5, **SAMPLES)
WITHOUT_HEAD = Recipe("latq", bits=3.5, ignore=("lm_head",), **SAMPLES)
SSQR = Recipe("ssqr", bits=4, group_size=16, target="residual", **SAMPLES)
BESIDE = ["--embedding-bits", "8", "--kv-cache-scheme", "fp8"]
OPTIONS = {
    GPTQ: ["--method", "gptq", "--bits", "4", "--group-size", "16", "--lm-head", *BESIDE],
    HPTQ: ["--method", "hptq", "--bits", "3.5"],
    LATQ: ["--method", "latq", "--bits", "3.5"],
    WITHOUT_HEAD: ["--method", "latq", "--bits", "3.5", "--keep-lm-head"],
    SSQR: ["--method", "ssqr", "--bits", "4", "--group-size", "16", "--target", "residual"],
}
# Hessians are summed in another order, in float32: of the integers, only those within its rounding of a tie may move.
SAME_INTEGERS = 0.999
# Fewer tokens for each than a Hessian needs: what stands in for them is summed over the processes, too.
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 1}
PATIENCE = 240.0


def torchrun(processes: int, log: Path, *arguments: str) -> int:
    """`latq quantize` in several processes: exit status; what they print goes to a file."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    with log.open("w") as file:
        return subprocess.run(
            [sys.executable, *command, "-m", "vllm_latq.cli.main", "quantize", *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE,
        ).returncode


def ranks(
    processes: int,
    log: Path,
    *arguments: str,
    variables: dict[str, str] | None = None,
    hangs: int | None = None,
    command: Any = forked.command,
) -> list[Any]:
    """The same processes without torchrun's own, started; rank r prints to `log` with r as its suffix.

    Args:
        processes, log, arguments: as for `torchrun`.
        variables: further variables of the environment.
        hangs: rank that stops when it has calibration samples.
        command: runs in the other ranks.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        forked.start(
            log.with_suffix(f".{rank}"),
            command if rank != hangs else forked.hanging_command,
            ["quantize", *arguments],
            world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | (variables or {}),
        )
        for rank in range(processes)
    ]


def without_fractions(note: str) -> str:
    """Counts stay: of tokens, for example. Steps and bits are computed from sums."""
    return re.sub(r"\d+\.\d+", "", note)


def assert_same_result(shared: Path, alone: Path, recipe: Recipe) -> None:
    """Up to the order of sums."""
    assert list(verify(shared)) == []
    one, many = CheckpointReader(alone), CheckpointReader(shared)
    expected, together = one.report(), many.report()
    assert together["calibration"] == expected["calibration"]
    assert sorted(one.shapes) == sorted(many.shapes)
    assert sorted(one.store.names()) == sorted(many.store.names())
    for name in one.store.names():
        if name.endswith(KV_SCALES):
            torch.testing.assert_close(one.store.get(name), many.store.get(name), rtol=1e-2, atol=0)
    for mine, theirs in zip(together["layers"], expected["layers"], strict=True):
        assert (mine["name"], without_fractions(mine["note"])) == (theirs["name"], without_fractions(theirs["note"]))
        # The first block's inputs are the same numbers; later ones have passed through the first one's weights, but
        # where all linears are seen in the original model.
        if recipe.method == "latq" or mine["name"].startswith("model.layers.0."):
            assert mine["bits"] == pytest.approx(theirs["bits"], rel=1e-2)
            assert mine["error"] == pytest.approx(theirs["error"], rel=1e-2)
            if recipe.method == "latq":
                assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-2)
            # The step of a whole model is a sum, too: steps may differ in their last bits.
            pair = one.weight(mine["name"]).dequantize(), many.weight(mine["name"]).dequantize()
            assert torch.isclose(*pair, rtol=1e-4).float().mean() >= SAME_INTEGERS


@pytest.mark.parametrize(
    ("processes", "model_type", "recipe"),
    [(2, "llama", WITHOUT_HEAD), (3, "mixtral", HPTQ), (3, "mixtral", LATQ), (3, "llama", SSQR)],
)
def test_equals_one_process(
    processes: int,
    model_type: str,
    recipe: Recipe,
    random_model: Any,
    calibration_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Statistics of latq's experts are made again here, share G, and each process holds those of its own experts."""
    blocks = 1 if model_type == "mixtral" else 2
    recomputed = model_type == "mixtral" and recipe.method == "latq"
    directory, _ = random_model(model_type, f"{model_type}-shared", **EXPERTS, num_hidden_layers=blocks)
    if recomputed:
        monkeypatch.setattr("vllm_latq.quantize.calibration.gram_sums.MOST_OWN", 0)
    quantize_checkpoint(recipe, directory, tmp_path / "alone", calibration=str(calibration_text))
    options = [*OPTIONS[recipe], "-v", "--num-samples", "7", "--seq-len", "32", "--calibration", str(calibration_text)]
    arguments = (str(directory), str(tmp_path / "shared"), *options)
    log = tmp_path / "log"
    if processes == 2:
        assert torchrun(2, log, *arguments) == 0, log.read_text()
        printed = log.read_text()
    else:
        command = forked.recomputing_command if recomputed else forked.command
        started = ranks(processes, log, *arguments, command=command)
        for process in started:
            process.join(PATIENCE)
        logs = [log.with_suffix(f".{rank}").read_text() for rank in range(processes)]
        assert [process.exitcode for process in started] == [0] * processes, logs
        printed = "".join(logs)
    assert_same_result(tmp_path / "shared", tmp_path / "alone", recipe)
    if recomputed:
        # Two rounds of the allocation, and one of rounding: G of w1 and of w3 are as large as H of w2.
        assert printed.count("(48, 48)") == 3 * 3 * 2
    notes = [layer["note"] for layer in CheckpointReader(tmp_path / "shared").report()["layers"]]
    assert any("stand in" in note for note in notes) == (model_type == "mixtral")
    lines = [line.strip() for line in printed.splitlines()]
    names = [line.split()[0] for line in lines if " bits " in line and re.match(r"\d+\.|lm_head", line)]
    shapes = CheckpointReader(tmp_path / "alone").linears
    assert sorted(names) == sorted(map(short_name, shapes)), "each once, by the first process"


def test_an_error_is_said_once(random_model: Any, calibration_text: Path, tmp_path: Path) -> None:
    """As soon as a process fails, torchrun ends the others: only the first one has spoken until then."""
    directory, _ = random_model("llama", "llama-shared")
    few = ["--method", "gptq", "--group-size", "16", "--num-samples", "1", "--seq-len", "32"]
    log = tmp_path / "log"
    first, second = ranks(2, log, str(directory), str(tmp_path / "out"), *few, "--calibration", str(calibration_text))
    first.join(PATIENCE)
    assert second.is_alive()
    second.terminate()
    second.join(PATIENCE)
    message = "latq: calibration samples: expected at least one for each of 2 processes"
    assert first.exitcode == 1
    assert log.with_suffix(".0").read_text().count(message) == 1
    assert message not in log.with_suffix(".1").read_text()
    assert not list(tmp_path.glob("out*")), "nothing that the next attempt would have to remove"


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_process_that_hangs_ends_the_others(
    stopped: int, random_model: Any, calibration_text: Path, tmp_path: Path
) -> None:
    """The other process waits as long as the environment says, and then names what it waited for."""
    directory, _ = random_model("llama", "llama-shared", num_hidden_layers=2)
    options = ["--method", "gptq", "--group-size", "16", "--num-samples", "7", "--seq-len", "32"]
    log, arguments = tmp_path / "log", (str(directory), str(tmp_path / "out"), *options)
    variables = {"LATQ_RANK_TIMEOUT": "3"}
    started = ranks(2, log, *arguments, "--calibration", str(calibration_text), variables=variables, hangs=stopped)
    other = started[1 - stopped]
    other.join(PATIENCE)
    started[stopped].kill()
    started[stopped].join(PATIENCE)
    printed = log.with_suffix(f".{1 - stopped}").read_text()
    assert other.exitcode == 1, printed
    assert f"latq: process {1 - stopped}: expected an answer of all 2 processes within 3 seconds" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf"])
def test_a_timeout_that_is_no_time_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LATQ_RANK_TIMEOUT", given)
    with pytest.raises(ConfigError, match="LATQ_RANK_TIMEOUT: expected a number of seconds"):
        World.join(torch.device("cpu"))


@pytest.mark.parametrize("folder", ["scratch", "elsewhere/scratch"])
def test_statistics_are_where_all_processes_see_them(mini_model: Path, tmp_path: Path, folder: str) -> None:
    class SecondMachine(World):
        """The first process has collected everything, where this one does not see it."""

        def from_first(self, make: Any) -> Any:
            return True

        def gather(self, make: Any) -> list[Any]:
            return [make()]

    decoder = Decoder(mini_model, "cpu")
    quantized = dict(decoder.linears(0))
    lattice = ModelLattice(decoder, quantized, LATQ, tmp_path / folder, SecondMachine(1, 2))
    with pytest.raises(ConfigError, match="a folder that all processes see, found nothing there for process 1"):
        lattice.collect(torch.zeros(2, 8, dtype=torch.int64), lambda hidden: hidden)


def test_each_linear_goes_to_one_rank() -> None:
    work = [
        InputHessian(SharedInput((f"linear{index}",)), torch.empty(size, size))
        for index, size in enumerate((5, 1, 3, 3, 2, 8))
    ]

    def effort(hessian: InputHessian) -> int:
        return hessian.matrix.numel()

    for size in (1, 2, 3, 9):
        shares = [World(rank, size).mine(work, effort) for rank in range(size)]
        leaders = sorted(hessian.shared.leader for share in shares for hessian in share)
        assert leaders == sorted(hessian.shared.leader for hessian in work)
    heaviest = World(0, 2).mine(work, effort)
    assert [hessian.shared.names for hessian in heaviest] == [("linear5",)], "8 x 8 outweighs the rest"


def test_samples_are_split() -> None:
    samples = torch.arange(14).reshape(7, 2)
    assert torch.equal(torch.cat([World(rank, 3).split(samples) for rank in range(3)]), samples)
