"""Statistics that are made again, a part at a time: the same numbers, and no files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from helpers.statistics import assert_same_statistics
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.files import TensorStore
from vllm_latq.quantize.allocation.model_lattice import ModelLattice
from vllm_latq.quantize.allocation.rates import Allocation
from vllm_latq.quantize.allocation.widths import WidthAllocation, allocate_widths
from vllm_latq.quantize.calibration.fisher import Backpropagation, collect_statistics
from vllm_latq.quantize.calibration.fisher_files import StatisticsFiles
from vllm_latq.quantize.calibration.gram_sums import gram_bytes
from vllm_latq.quantize.calibration.recomputed import RecomputedStatistics
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import model_parts
from vllm_latq.quantize.model.selection import never_quantized, quantized_linears
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

SEED = 3
TOKENS = torch.randint(3, 2048, (3, 20), generator=torch.Generator().manual_seed(1))
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("left_out", [(), (0,), (0, 1)], ids=["every-block", "not-the-first", "only-the-head"])
def test_they_are_those_of_one_pass(left_out: tuple[int, ...], random_model: Any, tmp_path: Path) -> None:
    """As often as the model is walked, and where the walk begins after its first block, or at the head."""
    directory, _ = random_model("mixtral", "made-again", **EXPERTS)
    decoder = Decoder(directory, "cpu")
    linears = {name: linear for index in range(len(decoder)) for name, linear in decoder.linears(index).items()}
    wanted = {name: linears[name] for name in linears.keys() - set(never_quantized(decoder))} | decoder.head_linears
    run, files = Backpropagation(decoder, TOKENS, wanted, SEED), StatisticsFiles(tmp_path)
    collect_statistics(run, files)
    again = RecomputedStatistics(run)
    for _ in range(2):
        for part in model_parts(decoder, wanted):
            if part.index in left_out:
                continue
            with part.weights() as module:
                found = again.of(part, module)
            means = {name: layer.to(decoder.device) for name, layer in found.items()}
            assert_same_statistics(means, files.read(part.index))


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize(("family", "target"), [("mixtral", "quantized"), ("llama", "residual")])
def test_statistics_that_are_made_again_give_the_same_bytes(
    family: str, target: str, random_model: Any, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted run, too, which keeps its allocation. Its scratch files are smaller than the grams of a block."""
    source, _ = random_model(family, f"made-again-{family}", **EXPERTS)
    decoder = Decoder(source, "cpu")
    largest = max(sum(gram_bytes(decoder.linears(index))[:2]) for index in range(len(decoder)))
    recipe = Recipe("latq", bits=3.5, target=target, ignore=("lm_head",), num_samples=4, seq_len=32)
    options = {"calibration": str(calibration_text)}
    quantize_checkpoint(recipe, source, tmp_path / "kept", **options)
    monkeypatch.setattr("vllm_latq.quantize.calibration.recomputed.MOST_ON_DISK", 0)
    seen: list[str] = []
    stages: list[str] = []

    def interrupt(event: Mapping[str, Any]) -> None:
        seen.append(event["event"])
        stages.append(event.get("stage", ""))
        files = [path for path in (tmp_path / "again.partial").rglob("*") if path.suffix != ".safetensors"]
        files += (tmp_path / "again.partial").rglob("scratch/*")
        assert sum(path.stat().st_size for path in files if path.is_file()) < largest
        if event["event"] == "block" and seen.count("block") == 1:
            raise InterruptionError

    with pytest.raises(InterruptionError):
        quantize_checkpoint(recipe, source, tmp_path / "again", on_event=interrupt, **options)
    assert {"statistics, backward", "allocation"} < set(stages)
    stages.clear()
    quantize_checkpoint(recipe, source, tmp_path / "again", resume=True, on_event=interrupt, **options)
    assert "allocation" not in stages
    assert seen.count("block") == 1 + 3
    for shard in sorted((tmp_path / "kept").glob("*.safetensors")):
        assert (tmp_path / "again" / shard.name).read_bytes() == shard.read_bytes()
    assert list(verify_certificate(tmp_path / "again", source, str(calibration_text))) == []


@pytest.mark.parametrize("grid", ["trellis", "group"])
@pytest.mark.parametrize("damage", ["file", "model"])
def test_an_allocation_that_does_not_fit_is_refused(
    damage: str, grid: str, random_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept for a resumed run, which does not walk the model for it."""
    source, _ = random_model("llama", f"allocated-{damage}-{grid}")
    monkeypatch.setattr("vllm_latq.quantize.calibration.recomputed.MOST_ON_DISK", 0)
    samples = torch.arange(64).view(2, 32) + 3
    groups = {"group_size": 16} if grid == "group" else {}
    recipe = Recipe("latq", bits=3.5, grid=grid, ignore=("lm_head",), num_samples=2, seq_len=32, **groups)
    progress: list[int] = []

    def allocation() -> Allocation | WidthAllocation:
        decoder = Decoder(source, "cpu")
        found = ModelLattice(decoder, quantized_linears(decoder, recipe), recipe, tmp_path / "scratch")
        found.collect(samples, lambda hidden: hidden)
        progress.clear()

        def advance(done: int, _parts: int) -> None:
            progress.append(done)

        return allocate_widths(found, advance) if grid == "group" else found.allocation(advance)

    expected = allocation()
    assert progress
    assert allocation().planned() == expected.planned()
    assert not progress
    if damage == "file":
        file = tmp_path / "scratch" / "losses.safetensors"
        written = bytearray(file.read_bytes())
        written[-1] ^= 1
        file.write_bytes(written)
    else:
        store = TensorStore(source)
        (file,) = {source / name for name in store.files.values()}
        last = "model.layers.1.mlp.down_proj.weight"
        tensors = {name: store.get(name) * (1 + (name == last)) for name in store.files}
        save_file(tensors, file, metadata={"format": "pt"})
    error, message = (CheckpointError, "as they were written") if damage == "file" else (ConfigError, "another model")
    with pytest.raises(error, match=message):
        allocation()
