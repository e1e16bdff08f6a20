"""The real engine on a model of images and text: its answers agree with transformers, about images too."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM, Idefics3Processor

from helpers.engine_probe import OLD_VLLM, probe
from helpers.logprobs import assert_agrees
from helpers.multimodal import random_multimodal, save_image_processor
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(OLD_VLLM, reason="vLLM 0.25 starts no Idefics3, dense or not, with transformers 5.23"),
]

LOGPROB_TOLERANCE = 2e-4  # both sides multiply by the same float32 numbers
TEXT = "<image>def f("
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 28, 28, 3))


@pytest.fixture(scope="module")
def checkpoint(mini_model: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("multimodal")
    random_multimodal(folder / "source", "idefics3", mini_model)
    save_image_processor(folder / "source")
    recipe = Recipe("ssqr", 3, group_size=32, outlier_rate=0.02, num_samples=8, seq_len=32)
    quantize_checkpoint(recipe, folder / "source", folder / "out", calibration=str(calibration_text))
    return folder / "out"


@pytest.fixture(scope="module")
def answers(checkpoint: Path) -> tuple[Any, Any, Any]:
    """Return the answers to prompts without and with images, and the layouts of the engine."""
    images = [{"text": TEXT, "image": pixels.tolist()} for pixels in PIXELS]
    ((text, pictured, layouts),) = probe(
        [{"model": checkpoint, "engine": {"max_model_len": 128}, "images": images, "layouts": True}]
    )
    return text, pictured, layouts


def assert_transformers_agrees(checkpoint: Path, answer: dict[str, Any], **pixels: torch.Tensor) -> None:
    model = AutoModelForMultimodalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert_agrees(model, answer["prompt"], answer, LOGPROB_TOLERANCE, **pixels)


def test_text_prompts(checkpoint: Path, answers: tuple[Any, Any, Any]) -> None:
    text, _, layouts = answers
    assert layouts == ["checkpoint"]
    for answer in text:
        assert_transformers_agrees(checkpoint, answer)


def test_image_prompts(checkpoint: Path, answers: tuple[Any, Any, Any]) -> None:
    """Two images after the same words; the processor is the checkpoint's own."""
    _, pictured, _ = answers
    processor = Idefics3Processor.from_pretrained(checkpoint)
    for answer, pixels in zip(pictured, PIXELS, strict=True):
        inputs = processor(text=TEXT, images=[Image.fromarray(pixels.astype("uint8"))], return_tensors="pt")
        assert inputs.pop("input_ids")[0].tolist() == answer["prompt"]
        del inputs["attention_mask"]
        assert_transformers_agrees(checkpoint, answer, **inputs)
    first, second = (answer["logprobs"][0] for answer in pictured)
    assert first != second
