"""Fixtures for all tests: the bundled model and its texts."""

from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def mini_model() -> Path:
    """The bundled trained model: Qwen3, hidden 256, 4 layers, bf16."""
    return DATA / "pydoc-mini"


@pytest.fixture(scope="session")
def calibration_text() -> Path:
    return DATA / "calibration.txt"


@pytest.fixture(scope="session")
def evaluation_text() -> Path:
    return DATA / "evaluation.txt"


@pytest.fixture(scope="session")
def ssqr_checkpoint(mini_model: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model quantized with SSQR, 4 bits, 1% outliers."""
    from vllm_latq.quantize.recipe import Recipe

    recipe = Recipe("ssqr", 4, outlier_rate=0.01, num_samples=32, seq_len=256)
    return _quantized(recipe, mini_model, calibration_text, tmp_path_factory)


@pytest.fixture(scope="session")
def hptq_checkpoint(mini_model: Path, calibration_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model quantized with HPTQ at 4.125 bits."""
    from vllm_latq.quantize.recipe import Recipe

    recipe = Recipe("hptq", target_bits=4.125, num_samples=32, seq_len=256)
    return _quantized(recipe, mini_model, calibration_text, tmp_path_factory)


def _quantized(recipe: object, model: Path, text: Path, factory: pytest.TempPathFactory) -> Path:
    from vllm_latq.quantize.pipeline import quantize_checkpoint

    destination = factory.mktemp("checkpoints") / "checkpoint"
    quantize_checkpoint(recipe, model, destination, calibration=str(text))  # type: ignore[arg-type]
    return destination
