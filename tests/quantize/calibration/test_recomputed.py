"""Statistics that are made again, a part at a time: the same numbers, and no files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.statistics import assert_same_statistics
from vllm_latq.quantize.calibration.fisher import Backpropagation, collect_statistics
from vllm_latq.quantize.calibration.fisher_files import StatisticsFiles
from vllm_latq.quantize.calibration.recomputed import RecomputedStatistics
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import model_parts
from vllm_latq.quantize.model.selection import never_quantized
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

SEED = 3
TOKENS = torch.randint(3, 2048, (3, 20), generator=torch.Generator().manual_seed(1))
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("left_out", [(), (0,)], ids=["every-block", "not-the-first"])
def test_they_are_those_of_one_pass(left_out: tuple[int, ...], random_model: Any, tmp_path: Path) -> None:
    """As often as the model is walked, and where the walk begins after its first block."""
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
            assert_same_statistics(found, files.read(part.index))


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize("target", ["quantized", "residual"])
def test_statistics_that_are_made_again_give_the_same_bytes(
    target: str, random_model: Any, calibration_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted run, too; and nothing of theirs is on disk."""
    source, _ = random_model("llama", "made-again-dense")
    recipe = Recipe("latq", bits=3.5, target=target, ignore=("lm_head",), num_samples=4, seq_len=32)
    options = {"calibration": str(calibration_text)}
    quantize_checkpoint(recipe, source, tmp_path / "kept", **options)
    monkeypatch.setattr("vllm_latq.quantize.calibration.recomputed.MOST_ON_DISK", 0)
    seen: list[str] = []

    def interrupt(event: Mapping[str, Any]) -> None:
        seen.append(event["event"])
        assert not list((tmp_path / "again.partial").glob("scratch/*"))
        if event["event"] == "block" and seen.count("block") == 1:
            raise InterruptionError

    with pytest.raises(InterruptionError):
        quantize_checkpoint(recipe, source, tmp_path / "again", on_event=interrupt, **options)
    quantize_checkpoint(recipe, source, tmp_path / "again", resume=True, on_event=interrupt, **options)
    assert seen.count("block") == 1 + 3
    for shard in sorted((tmp_path / "kept").glob("*.safetensors")):
        assert (tmp_path / "again" / shard.name).read_bytes() == shard.read_bytes()
    assert list(verify_certificate(tmp_path / "again", source, str(calibration_text))) == []
