"""Other quantizers for `bench`: where they are installed, how they are run, and what their checkpoints say.

Each runs in a virtual environment of its own, with pinned versions, by a script that imports nothing of this project
and gets a `Job` as JSON. Invariant: a checkpoint is read here from its packed tensors alone, and must agree with the
weights that the peer itself held (`witness`).
"""

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vllm_latq.coding.packing import unpack_codes
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.files import TensorStore
from vllm_latq.format.tensors import stored_bits

# Largest difference of a witness in bfloat16 or float16, relative to the largest weight of its row.
WITNESS_TOLERANCE = 2.0**-7


@dataclass(frozen=True)
class Job:
    """One quantization by a peer, as its script reads it.

    Attributes:
        model: Hugging Face directory.
        tokens: safetensors file with `tokens`, int64 [n, seq_len].
        bits, group_size: of the grid.
        output: directory to create.
        threads: of torch.
        batch_size: windows per forward pass.
        options: what the setting adds to the arguments of the peer's description of the grid.
    """

    model: str
    tokens: str
    bits: int
    group_size: int
    output: str
    threads: int
    batch_size: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """Times of one run, in seconds.

    Attributes:
        quantize: wall time of the quantization: from when the model is open and the text tokenized; until the weights
            are quantized or, of this package, which writes each block as it is done, stored.
        quantize_cpu: processor time of the same, all threads of the process; what neighbours on the machine take from
            it does not count.
        process, process_cpu: of the whole process, imports and files included.
    """

    quantize: float
    quantize_cpu: float
    process: float
    process_cpu: float


@dataclass(frozen=True)
class PeerWeight:
    """A dequantized linear: float32 [r, c], and the bits of everything that its checkpoint stores for it."""

    dense: torch.Tensor
    bits: int


@dataclass(frozen=True)
class Peer:
    """A quantizer that is not this one.

    Attributes:
        requirements: what pip installs, in this order, one call each.
        settings: name -> options of its script.
        read: checkpoint directory -> linear name -> weight.
        environment: variables it needs.
    """

    requirements: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]]
    read: Callable[[Path], dict[str, PeerWeight]]
    environment: Mapping[str, str] = field(default_factory=dict)


def install(name: str, folder: Path) -> Path:
    """The Python of a peer's environment under `folder`, created and filled at the first call; CheckpointError."""
    place = folder / name
    python, ready = place / "bin" / "python", place / "installed"
    requirements = "\n".join(PEERS[name].requirements)
    if not ready.exists() or ready.read_text() != requirements:
        venv.create(place, with_pip=True)
        for requirement in PEERS[name].requirements:
            command = [str(python), "-m", "pip", "install", "--quiet", requirement]
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                raise CheckpointError(str(place), f"an installed {requirement}", done.stderr[-2000:].strip())
        ready.write_text(requirements)
    return python


def run(python: Path | str, script: str, job: Job, environment: Mapping[str, str]) -> Timing:
    """Run a job to its end with `quantize/{script}`; its output goes to a log beside the checkpoint.

    Raises:
        CheckpointError: it failed; with the end of what it wrote.
    """
    output = Path(job.output)
    paths = {what: output.with_name(f"{output.name}.{what}") for what in ("job", "seconds", "log")}
    paths["job"].write_text(json.dumps(asdict(job) | {"seconds": str(paths["seconds"])}))
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" or python == sys.executable}
    variables |= {"OMP_NUM_THREADS": str(job.threads), "HF_HUB_OFFLINE": "1", **environment}
    # -P: the script's folder holds modules named like some of the standard library.
    command = [str(python), "-P", str(Path(__file__).with_name(script)), str(paths["job"])]
    started = time.perf_counter()
    # In the folder of the checkpoints, because peers leave logs where they run.
    where = output.parent
    with open(paths["log"], "w") as log:
        process = subprocess.Popen(command, env=variables, cwd=where, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        said = paths["log"].read_text(errors="replace")[-2000:].strip()
        raise CheckpointError(script, "a run that ends well", f"exit code {process.returncode} after:\n{said}")
    seconds = json.loads(paths["seconds"].read_text())
    whole = time.perf_counter() - started
    return Timing(seconds["quantize"], seconds["quantize_cpu"], whole, usage.ru_utime + usage.ru_stime)


def check_witness(weights: Mapping[str, PeerWeight], witness: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuse weights that are not those the peer held, in its own dtype, when it had quantized them."""
    if weights.keys() != witness.keys():
        differing = sorted(weights.keys() ^ witness.keys())
        raise CheckpointError(where, "the linears that were quantized", f"a difference at {differing[0]}")
    for name, weight in weights.items():
        wrong = (weight.dense - witness[name].float()).abs().amax(1) / weight.dense.abs().amax(1).clamp(min=1e-30)
        if not float(wrong.max()) <= WITNESS_TOLERANCE:
            raise CheckpointError(f"{where}: {name}", "the peer's own weights", f"{float(wrong.max()):.3g} apart")


def compressed_tensors_weights(directory: Path) -> dict[str, PeerWeight]:
    """Linears of a checkpoint in compressed-tensors' `pack-quantized` format.

    Codes are offset by half the grid and packed along the inputs; zero points, if any, along the outputs.
    """
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    if config["format"] != "pack-quantized":
        raise ConfigError(f"{directory}/config.json", "format pack-quantized", repr(config["format"]))
    bits = int(config["config_groups"]["group_0"]["weights"]["num_bits"])
    offset = 1 << (bits - 1)
    weights = {}
    for name, stored in _modules(directory, "weight_packed").items():
        rows, cols = (int(size) for size in stored["weight_shape"])
        integers = unpack_codes(stored["weight_packed"], bits, cols).to(torch.int32) - offset
        scales = stored["weight_scale"].float()
        width = cols // scales.shape[1]
        if "weight_zero_point" in stored:
            zeros = unpack_codes(stored["weight_zero_point"].T.contiguous(), bits, rows).T.to(torch.int32) - offset
            integers -= zeros.repeat_interleave(width, 1)
        weights[name] = PeerWeight(integers * scales.repeat_interleave(width, 1), stored_bits(stored))
    return weights


def gptq_weights(directory: Path) -> dict[str, PeerWeight]:
    """Linears of a checkpoint in AutoGPTQ's format, version 1 (zero points stored less 1) or 2.

    Codes are packed along the inputs, zero points along the outputs; `g_idx` says which group an input belongs to.
    """
    config = json.loads((directory / "quantize_config.json").read_text())
    if config["checkpoint_format"] not in ("gptq", "gptq_v2"):
        expected = "checkpoint_format gptq or gptq_v2"
        raise ConfigError(f"{directory}/quantize_config.json", expected, repr(config["checkpoint_format"]))
    less = 1 if config["checkpoint_format"] == "gptq" else 0
    linears = _modules(directory, "qweight").items()
    return {name: _gptq_weight(stored, int(config["bits"]), less, stored["g_idx"].long()) for name, stored in linears}


def autoround_weights(directory: Path) -> dict[str, PeerWeight]:
    """Linears of a checkpoint in AutoRound's format with AutoGPTQ's packing, its choice for symmetric grids.

    Packed as AutoGPTQ's version 1, but groups are runs of `group_size` inputs and no tensor says so.
    """
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    if config.get("packing_format") != "auto_round:auto_gptq":
        expected = "packing_format auto_round:auto_gptq"
        raise ConfigError(f"{directory}/config.json", expected, repr(config.get("packing_format")))
    bits, width = int(config["bits"]), int(config["group_size"])
    weights = {}
    for name, stored in _modules(directory, "qweight").items():
        group = torch.arange(stored["qweight"].shape[0] * 32 // bits) // width
        weights[name] = _gptq_weight(stored, bits, 1, group)
    return weights


def _gptq_weight(stored: Mapping[str, torch.Tensor], bits: int, less: int, group: torch.Tensor) -> PeerWeight:
    """Weight packed as AutoGPTQ packs it: zero points are stored less `less`, `group` has the group of each input."""
    scales = stored["scales"].float().T
    codes = unpack_codes(stored["qweight"].T.contiguous(), bits, len(group)).to(torch.int32)
    zeros = unpack_codes(stored["qzeros"], bits, len(scales)).T.to(torch.int32)
    zeros = (zeros + less) % (1 << bits)
    return PeerWeight((codes - zeros[:, group]) * scales[:, group], stored_bits(stored))


def _modules(directory: Path, leaf: str) -> dict[str, dict[str, torch.Tensor]]:
    """Linear name -> its tensors, for every linear that has a tensor `leaf`."""
    store = TensorStore(directory)
    names = list(store.names())
    modules = [name.removesuffix(f".{leaf}") for name in names if name.endswith(f".{leaf}")]
    if not modules:
        raise CheckpointError(str(directory), f"linears with {leaf}", "none")
    found: dict[str, dict[str, torch.Tensor]] = {module: {} for module in modules}
    for name in names:
        module, _, tensor = name.rpartition(".")
        if module in found and tensor != "bias":
            found[module][tensor] = store.get(name)
    return found


def read_witness(directory: Path) -> dict[str, torch.Tensor]:
    """Linear name -> what the peer held, from the file its script left beside the checkpoint."""
    return load_file(directory.with_name(f"{directory.name}.seconds.witness"))


PEERS = {
    "llmcompressor": Peer(
        ("torch==2.13.0", "llmcompressor==0.14.0.1"),
        # Act-order (static) is its default.
        {
            "default": {},
            "MSE": {"observer": "memoryless_mse"},
            "MSE by importance": {"observer": "imatrix_mse"},
        },
        compressed_tensors_weights,
    ),
    "gptqmodel": Peer(
        ("torch==2.15.0", "gptqmodel==7.7.0"),
        {
            "default": {},
            "act-order, MSE": {"desc_act": True, "mse": 2.4},
        },
        gptq_weights,
        # With fewer than 4 cores it asks for more workers than it starts, and stops.
        {"GPTQMODEL_CPU_WORKERS": "2"},
    ),
    "autoround": Peer(
        ("torch==2.13.0", "auto-round==0.16.1"),
        {
            "default": {},
            # The recipe of `auto-round-best`, which also takes more calibration text than `auto-round`.
            "best": {"iters": 1000},
        },
        autoround_weights,
    ),
}
