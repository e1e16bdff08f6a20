"""Results of evaluations beside a checkpoint: they add up, are JSON, and touch nothing else."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import pytest

import vllm_latq
from helpers.checkpoints import problems
from helpers.format_reader import fingerprint
from vllm_latq.cli.inspect import inspect_checkpoint
from vllm_latq.errors import CheckpointError
from vllm_latq.format.evaluation import evaluation_runs, kept_runs
from vllm_latq.format.reader import EVALUATION_FILE
from vllm_latq.quantize.evaluation.results import add_run, described_text, is_checkpoint
from vllm_latq.quantize.model.companion_files import companion_files


def test_runs_add_up_beside_a_valid_checkpoint(ssqr_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(ssqr_checkpoint, tmp_path / "copy"))
    assert kept_runs(checkpoint) == []
    add_run(checkpoint, {"kl": 0.5, "perplexity": math.inf, "tasks": {"arc": {"acc,none": 1.0, "alias": print}}})
    add_run(checkpoint, {"kl": 0.25})
    first, second = kept_runs(checkpoint)
    assert (first["kl"], first["perplexity"], first["vllm_latq"]) == (0.5, None, vllm_latq.__version__)
    assert first["tasks"]["arc"] == {"acc,none": 1.0, "alias": str(print)}
    assert first["date"] <= second["date"]
    assert problems(checkpoint) == ""
    assert inspect_checkpoint(checkpoint)["evaluation"]["kl"] == 0.25
    config = json.loads((checkpoint / "config.json").read_text())
    assert fingerprint(checkpoint) == config["quantization_config"]["fingerprint"]
    # A later quantization of the directory would not take over results of other weights.
    assert EVALUATION_FILE not in map(str, companion_files(checkpoint))


@pytest.mark.parametrize("content", ["[]", "{}", '{"runs": {}}', '{"runs": [1]}', "{"])
def test_damaged_results_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / EVALUATION_FILE).write_text(content)
    with pytest.raises(CheckpointError, match="it only holds results of earlier `latq eval`"):
        add_run(tmp_path, {})
    assert (tmp_path / EVALUATION_FILE).read_text() == content


@pytest.mark.parametrize("metric", ["1e999", "1" + 400 * "0"])
def test_numbers_that_are_not_finite_are_refused(metric: str, ssqr_checkpoint: Path, tmp_path: Path) -> None:
    """Python's JSON reads them."""
    checkpoint = Path(shutil.copytree(ssqr_checkpoint, tmp_path / "copy"))
    (checkpoint / EVALUATION_FILE).write_text(f'{{"runs": [{{"tasks": {{"arc": {{"acc": {metric}}}}}}}]}}')
    for read in (evaluation_runs, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=r"runs\[0\].tasks.arc.acc: expected a finite number"):
            read(checkpoint)


def test_only_checkpoints_on_this_machine_keep_results(ssqr_checkpoint: Path, mini_model: Path) -> None:
    assert is_checkpoint(ssqr_checkpoint)
    assert not is_checkpoint(mini_model)
    assert not is_checkpoint("org/name")


def test_text_is_named_with_its_digest(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("words")
    digest = hashlib.sha256(b"words").hexdigest()
    assert described_text(str(tmp_path / "text.txt")) == {"name": "text.txt", "sha256": digest}
    assert described_text("wikitext2") == {"name": "wikitext2", "sha256": None}
