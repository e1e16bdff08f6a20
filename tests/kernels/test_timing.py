"""Timing: what needs no GPU everywhere, and what needs one on a machine that has it."""

import pytest
import torch

from vllm_latq.kernels.bench.timing import (
    COPY_BYTES,
    READ_WORDS,
    ROTATION,
    Timing,
    cache_bytes,
    copies_beyond_cache,
    copy_gb_per_s,
    reads,
    require_gpu,
    summary,
    time_graph,
)
from vllm_latq.kernels.errors import KernelInputError

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
FASTEST_MEMORY_GB_PER_S = 10_000  # above every GPU's data sheet: a higher rate was read from a cache


@needs_no_gpu
def test_a_machine_without_a_gpu_is_refused_with_a_way_out() -> None:
    with pytest.raises(KernelInputError, match="benchmark: expected a CUDA GPU, found none") as refused:
        require_gpu()
    assert "roofline" in str(refused.value)
    assert "audit" in str(refused.value)


@pytest.mark.parametrize(("size", "cache"), [(0, 0), (0, 100), (1, 100), (99, 100), (10**9, 100)])
def test_copies_exceed_the_cache(size: int, cache: int) -> None:
    copies = copies_beyond_cache(size, cache)
    assert copies >= 2
    assert copies * max(size, 1) >= ROTATION * cache


@pytest.mark.parametrize("microseconds", [[1.0, 3.0], [3.0, 1.0, 2.0], [5.0] * 20])
def test_summary_is_in_order_and_within_its_measurements(microseconds: list[float]) -> None:
    timing = summary(microseconds)
    assert min(microseconds) <= timing.low <= timing.median <= timing.high <= max(microseconds)


@pytest.mark.parametrize("size", [1, 4 * READ_WORDS, 4 * READ_WORDS + 1])
def test_each_read_has_its_own_copy_of_whole_programs(size: int) -> None:
    launches = reads(size, 3 * 4 * READ_WORDS, torch.device("cpu"))
    parts = [launch.args[0] for launch in launches]
    words = -(-size // (4 * READ_WORDS)) * READ_WORDS
    assert len(parts) == copies_beyond_cache(size, 3 * 4 * READ_WORDS)
    assert {part.numel() for part in parts} == {words}
    assert len({part.data_ptr() for part in parts}) == len(parts)


@needs_gpu
def test_a_graph_takes_time() -> None:
    x = torch.ones(1 << 20, device=require_gpu())
    timing = time_graph([lambda: torch.neg(x), lambda: torch.abs(x)])
    assert isinstance(timing, Timing)
    assert 0 < timing.low <= timing.median <= timing.high


@needs_gpu
def test_a_copy_reaches_memory_and_no_cache() -> None:
    device = require_gpu()
    assert 2 * COPY_BYTES > ROTATION * cache_bytes(device) > 0
    assert 0 < copy_gb_per_s(device) < FASTEST_MEMORY_GB_PER_S
