"""This package beside other quantizers, in one run: `python -m vllm_latq.quantize.studies.bench`.

    python -m vllm_latq.quantize.studies.bench MODEL --calibration FILE --text FILE \\
        [--peers llmcompressor gptqmodel autoround] [-o JSON]

Every quantizer runs in a process of its own, on one thread of the CPU, on the same calibration windows of the same
model. What it stored is counted in bits; what that dequantizes to is put into the original model and evaluated, in
float32, by the same code for all. Invariant: the rows differ in nothing but their quantized weights.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_latq.console import print_table
from vllm_latq.errors import ConfigError, LatqError
from vllm_latq.format.files import TensorStore
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.quantize.calibration.stream import model_hessians, samples_per_batch
from vllm_latq.quantize.calibration.windows import calibration_samples
from vllm_latq.quantize.evaluation.evaluate import evaluate
from vllm_latq.quantize.lattice.targets import output_energy, output_error
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.originals.store import OriginalStore
from vllm_latq.quantize.recipe import HEAD, Recipe
from vllm_latq.quantize.studies.peers import PEERS, Job, PeerWeight, Timing, check_witness, install, read_witness, run

OURS = "latq"
WARM_UP_WINDOWS = 8
COLUMNS = ("quantizer", "bits", "KL", "perplexity", "layer error", "seconds (CPU)", "with start and files (CPU)")


@dataclass(frozen=True)
class Row:
    """One measured run.

    Attributes:
        quantizer: of OURS and PEERS.
        setting: name of its setting.
        nominal_bits: width of the codes.
        bits: stored bits per weight of the quantized linears, everything counted.
        kl: mean KL(original || quantized) of the next-token distributions, nats per token.
        perplexity: of the quantized model.
        layer_error: sum over linears of the relative squared output error on the original model's inputs.
        timing: of its process.
        options: what the setting stands for.
    """

    quantizer: str
    setting: str
    nominal_bits: int
    bits: float
    kl: float
    perplexity: float
    layer_error: float
    timing: Timing
    options: Mapping[str, Any]

    def cells(self) -> tuple[str, ...]:
        """Texts of the cells of this row of the table."""
        wall, busy = self.timing, f"{self.timing.quantize_cpu:.1f}"
        return (
            f"{self.quantizer} {self.setting}",
            f"{self.bits:.3f}",
            f"{self.kl:.2e}",
            f"{self.perplexity:.3f}",
            f"{self.layer_error:.4f}",
            f"{wall.quantize:.1f} ({busy})",
            f"{wall.process:.1f} ({wall.process_cpu:.1f})",
        )


def our_settings(bits: int, group_size: int, **shared: Any) -> dict[str, Recipe]:
    """Name -> recipe of this package's rows at `bits`: latq gets what packed codes store at least.

    All leave the head as it is, as the peers do.
    """
    packed: dict[str, Any] = {"bits": bits, "group_size": group_size, **shared}
    return {
        "gptq, mid-rise, absmax": Recipe("gptq", grid="midrise", scales="absmax", **packed),
        "gptq": Recipe("gptq", **packed),
        "gptq, min-pivot, fitted, 4 sweeps": Recipe("gptq", order="min-pivot", scales="fitted", sweeps=4, **packed),
        "ssqr 1%": Recipe("ssqr", **packed),
        "latq": Recipe("latq", bits=bits + 16 / group_size, ignore=(HEAD,), **shared),
    }


class Bench:
    """Model, texts and settings that all rows share.

    Args:
        model: Hugging Face directory.
        calibration: text file or dataset name.
        text: of the evaluation.
        num_samples, seq_len: of the calibration; the evaluation has windows of `seq_len` too.
        folder: for the checkpoints and logs.
        environments: folder of the peers' virtual environments.
        threads: of every quantizer.
        max_windows: of the evaluation.
        group_size: inputs to a scale.
        dtype: bfloat16, or float32 to give the quantizers a copy of the model that is stored so. llm-compressor runs a
            model in the dtype that it is stored in, and stores its scales so.
    """

    def __init__(  # noqa: PLR0913 (every row of the table shares all of them)
        self,
        model: Path,
        calibration: str,
        text: str,
        num_samples: int,
        seq_len: int,
        folder: Path,
        environments: Path,
        threads: int = 1,
        max_windows: int | None = None,
        group_size: int = 128,
        dtype: str = "bfloat16",
    ) -> None:
        self.model, self.text = model, text
        # The quantizers run in a folder of their own.
        self.calibration = str(Path(calibration).resolve()) if Path(calibration).exists() else calibration
        self.num_samples, self.seq_len = num_samples, seq_len
        self.folder, self.environments, self.threads, self.max_windows = folder, environments, threads, max_windows
        self.group_size, self.dtype = group_size, dtype
        # Windows at a time, for every quantizer: the batch that this package uses on a CPU.
        self.batch = samples_per_batch(torch.device("cpu"), seq_len)
        self.decoder = Decoder(model, "cpu")
        recipe = Recipe("gptq", num_samples=num_samples, seq_len=seq_len)
        samples = calibration_samples(self.decoder, recipe, calibration).tokens
        self.samples = samples
        # The model that the quantizers get.
        self.source = model
        if dtype == "float32":
            if OriginalStore(model).dequantizes:
                raise ConfigError("--dtype", "bfloat16 for a model that is published quantized", dtype)
            self.source = folder / dtype
            write_dense(model, {}, self.source)
        # Linear -> X^T X of its inputs, all in memory.
        inputs = model_hessians(self.decoder, samples)
        self.hessians = {name: hessian.matrix for hessian in inputs for name in hessian.shared.names}

    def ours(self, setting: str, recipe: Recipe, bits: int) -> Row:
        """Quantize with this package, and measure."""
        options = {"recipe": recipe.to_dict(), "calibration": self.calibration}
        job = self._job(OURS, setting, bits, self.samples, options)
        timing = run(sys.executable, "peer_latq.py", job, {})
        reader = CheckpointReader(job.output)
        weights = {}
        for name in reader.linears:
            weight = reader.weight(name)
            weights[name] = PeerWeight(weight.dequantize(), weight.storage_bits())
        return self._measure(OURS, setting, bits, weights, timing, recipe.to_dict())

    def peer(self, name: str, setting: str, bits: int) -> Row:
        """Quantize with a peer, compare its checkpoint with what it held in memory, and measure."""
        python, peer = install(name, self.environments), PEERS[name]
        script = f"peer_{name}.py"
        warm = self.environments / name / "warm"
        if not warm.exists():
            # A first run may compile extensions, which it then keeps.
            few = self._job(name, "warm-up", bits, self.samples[:WARM_UP_WINDOWS], peer.settings[setting])
            run(python, script, few, peer.environment)
            warm.touch()
        job = self._job(name, setting, bits, self.samples, peer.settings[setting])
        timing = run(python, script, job, peer.environment)
        output = Path(job.output)
        weights = peer.read(output)
        check_witness(weights, read_witness(output), str(output))
        return self._measure(name, setting, bits, weights, timing, peer.settings[setting])

    def _job(self, quantizer: str, setting: str, bits: int, samples: torch.Tensor, options: Mapping[str, Any]) -> Job:
        output = self.folder / "-".join((quantizer, str(bits), "".join(c if c.isalnum() else "_" for c in setting)))
        tokens = output.with_name(f"{output.name}.tokens")
        save_file({"tokens": samples}, tokens)
        return Job(
            str(self.source.resolve()),
            str(tokens),
            bits,
            self.group_size,
            str(output),
            self.threads,
            self.batch,
            dict(options),
        )

    def _measure(
        self,
        quantizer: str,
        setting: str,
        nominal: int,
        weights: Mapping[str, PeerWeight],
        timing: Timing,
        options: Mapping[str, Any],
    ) -> Row:
        error = self._layer_error(weights)
        dense = self.folder / "dense"
        write_dense(self.model, {name: weight.dense for name, weight in weights.items()}, dense)
        found = evaluate(
            dense,
            self.text,
            seq_len=self.seq_len,
            baseline=self.model,
            device="cpu",
            batch_size=self.batch,
            dtype="float32",
            max_windows=self.max_windows,
        )
        shutil.rmtree(dense)
        assert found.kl is not None
        bits = sum(weight.bits for weight in weights.values()) / sum(w.dense.numel() for w in weights.values())
        return Row(quantizer, setting, nominal, bits, found.kl, found.perplexity, error, timing, options)

    def _layer_error(self, weights: Mapping[str, PeerWeight]) -> float:
        """Sum over linears of ||X (Q - W)^T||^2 / ||X W^T||^2, X the inputs in the original model."""
        assert weights.keys() == self.hessians.keys()
        total = 0.0
        for name, weight in weights.items():
            original = self.decoder.store.get(f"{name}.weight").float()
            gram = self.hessians[name]
            total += output_error(weight.dense, original, gram, None) / output_energy(original, gram)
        return total


def write_dense(source: Path, weights: Mapping[str, torch.Tensor], target: Path) -> None:
    """The model at `source` in float32 with other weights, as a Hugging Face directory."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    store = TensorStore(source)
    tensors = {name: store.get(name).float() for name in store.names()}
    tensors |= {f"{name}.weight": weight.float().contiguous() for name, weight in weights.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def rows(bench: Bench, bits: int, peers: list[str], only: list[str] | None) -> Iterator[Row]:
    """All rows at a width, ours between those of the peers, so that a change of the machine's load meets both."""

    def wanted(quantizer: str, setting: str) -> bool:
        return only is None or f"{quantizer} {setting}" in only

    theirs = [
        partial(bench.peer, name, setting, bits)
        for name in peers
        for setting in PEERS[name].settings
        if wanted(name, setting)
    ]
    sizes = {"num_samples": bench.num_samples, "seq_len": bench.seq_len, "dtype": bench.dtype}
    settings = our_settings(bits, bench.group_size, **sizes).items()
    ours = [partial(bench.ours, setting, recipe, bits) for setting, recipe in settings if wanted(OURS, setting)]
    for measure in chain.from_iterable(zip_longest(ours, theirs)):
        try:
            if measure is not None:
                yield measure()
        except LatqError as error:
            print(error, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; `arguments` replace those of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_latq.quantize.studies.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--peers", nargs="*", choices=sorted(PEERS), default=sorted(PEERS), help="none: ours alone")
    parser.add_argument("--only", nargs="+", help='rows to run, by name: "latq gptq" "gptqmodel default"')
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache/vllm-latq/peers")
    parser.add_argument("--num-samples", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--max-windows", type=int, help="of the evaluation text (default all)")
    parser.add_argument("--group-size", type=int, default=128, choices=(32, 64, 128))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="see `Bench`")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("-o", "--output", type=Path, help="JSON file, rewritten after each row")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    measured: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            options.model,
            options.calibration,
            options.text,
            options.num_samples,
            options.seq_len,
            Path(folder),
            options.environments,
            options.threads,
            options.max_windows,
            options.group_size,
            options.dtype,
        )
        for bits in options.bits:
            start = len(measured)
            for row in rows(bench, bits, options.peers, options.only):
                measured.append(row)
                print(*row.cells(), sep="  ", flush=True)
                if options.output:
                    options.output.write_text(json.dumps([asdict(one) for one in measured], indent=1) + "\n")
            print_table(f"{options.model.name}, {bits} bits", COLUMNS, [row.cells() for row in measured[start:]])


if __name__ == "__main__":
    try:
        main()
    except LatqError as error:
        raise SystemExit(f"bench: {error}") from None
