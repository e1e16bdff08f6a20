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
