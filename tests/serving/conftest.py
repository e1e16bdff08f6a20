"""CPUs without our C++ products."""

import pytest

from vllm_latq.kernels.cpu import library


@pytest.fixture
def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve with the layouts of CPUs that our products do not run on."""
    monkeypatch.setattr(library, "instructions", lambda: None)
