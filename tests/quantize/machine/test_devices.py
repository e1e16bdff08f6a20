"""Quantizing on a GPU, as far as a machine without one can tell: no step mixes devices, and numbers are the CPU's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.pretend_gpu import DEVICE, OnGpu, pretend_gpu
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.evaluation.evaluate import evaluate
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

FEW: dict[str, Any] = {"num_samples": 4, "seq_len": 64, "dtype": "float32"}
GROUPS = {"group_size": 32}
FEWER = ("lm_head", "q_proj", "k_proj", "up_proj")
FEWEST = (*FEWER, "o_proj", "gate_proj")
RECIPES: dict[str, Recipe] = {
    "gptq": Recipe(method="gptq", grid="midrise", scales="fitted", target="original", **GROUPS, **FEW),
    # It searches long: without those of the same inputs.
    "ssqr": Recipe(method="ssqr", ignore=FEWER, **GROUPS, **FEW),
    "hptq": Recipe(method="hptq", bits=3.125, ignore=FEWER, **FEW),
    "latq": Recipe(method="latq", bits=3.125, ignore=FEWER, **FEW),
    "gptq-residual": Recipe(method="gptq", bits=4, target="residual", **GROUPS, **FEW),
    "latq-residual": Recipe(method="latq", bits=6.0, target="residual", ignore=FEWEST, **FEW),
}


def test_the_pretended_device_refuses_what_a_real_one_would() -> None:
    with pretend_gpu():
        on_gpu, on_cpu = torch.ones(3, device="cuda"), torch.ones(3)
        assert isinstance(on_gpu, OnGpu)
        assert (on_gpu + 1).device == on_cpu.to(torch.device("cuda")).device == DEVICE
        assert torch.equal(on_gpu.cpu(), on_cpu)
        with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
            on_gpu + on_cpu
        with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
            torch.nn.functional.linear(on_gpu, torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
            on_cpu[on_gpu > 0]
        with pytest.raises(TypeError, match="numpy"):
            on_gpu.numpy()


@pytest.mark.parametrize("method", RECIPES)
def test_a_run_on_the_gpu(random_model: Any, calibration_text: Path, tmp_path: Path, method: str) -> None:
    source, _ = random_model("qwen3", f"devices-{method}", num_hidden_layers=1, intermediate_size=64)
    options = {"calibration": str(calibration_text)}
    quantize_checkpoint(RECIPES[method], source, tmp_path / "cpu", device="cpu", **options)
    with pretend_gpu():
        quantize_checkpoint(RECIPES[method], source, tmp_path / "gpu", device="cuda", **options)
        assert not list(verify_certificate(tmp_path / "gpu", source, str(calibration_text), device="cuda"))
        assert evaluate(tmp_path / "gpu", str(calibration_text), 64, device="cuda", max_windows=1).perplexity > 1
    parts = [
        {file.name: load_file(file) for file in (tmp_path / side).glob("*.safetensors")} for side in ("cpu", "gpu")
    ]
    assert parts[0]
    torch.testing.assert_close(parts[1], parts[0], rtol=0, atol=0)
