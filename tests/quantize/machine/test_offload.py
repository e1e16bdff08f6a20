"""Activations on disk: the same checkpoint, nothing left behind; a model larger than the memory it is quantized in."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.programs import run_program
from vllm_latq.errors import ConfigError
from vllm_latq.quantize.machine.offload import placer
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

IGNORED = ("lm_head", "q_proj", "k_proj", "gate_proj", "up_proj", "down_proj")
RECIPES = {
    "gptq": Recipe("gptq", 4, group_size=16, num_samples=4, seq_len=32),
    "latq": Recipe("latq", bits=6.0, num_samples=4, seq_len=32, ignore=IGNORED),
}
# 16 blocks of 2.6 M weights in float32.
LARGE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16}
HEADS = {"head_dim": 128, "num_key_value_heads": 4}


@pytest.mark.parametrize("method", RECIPES)
def test_same_checkpoint_and_nothing_left(
    method: str, random_model: Any, calibration_text: Path, tmp_path: Path
) -> None:
    directory, _ = random_model("llama", "offloaded")
    for offload in ("cpu", "disk"):
        out = tmp_path / offload
        quantize_checkpoint(RECIPES[method], directory, out, calibration=str(calibration_text), offload=offload)
    names = sorted(path.name for path in (tmp_path / "cpu").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "disk").iterdir())
    for name in names:
        if name not in ("latq_report.json", "README.md"):  # hold seconds, and the name of the directory
            assert (tmp_path / "cpu" / name).read_bytes() == (tmp_path / "disk" / name).read_bytes()


def test_mapped_tensor_keeps_its_values_without_a_file(tmp_path: Path) -> None:
    place = placer("disk", tmp_path)
    for shape in ((3, 5, 7), (1,), (0, 4)):
        original = torch.randn(shape)
        placed = place(original)
        assert torch.equal(placed, original)
        assert list(tmp_path.iterdir()) == []
        assert torch.equal(placed.add_(1), original + 1)


def test_unknown_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one of cpu, disk, found 'gpu'"):
        placer("gpu", tmp_path)


def test_memory_of_a_block_not_of_the_model(random_model: Any, tmp_path: Path) -> None:
    """Beyond its libraries, a process needs less than a third of a model of 170 MB to quantize the model."""
    directory, model = random_model("llama", "large", **LARGE, **HEADS)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert size > 160e6
    done = run_program("peak_of_rtn.py", directory, tmp_path / "out", timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) < size / 3
