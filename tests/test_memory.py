"""Memory of this process, on a kernel whose /proc lacks the figures."""

from pathlib import Path

import pytest

from vllm_latq import memory


@pytest.mark.parametrize("status", [None, "Name:\tpython\nThreads:\t1\n"])
def test_peak_comes_from_getrusage_where_proc_lacks_it(
    status: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = memory.peak_memory()
    if status is not None:
        (tmp_path / "status").write_text(status)
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    # Not reset by exec: at least what /proc says of the process since.
    assert memory.peak_memory() >= 0.99 * said
