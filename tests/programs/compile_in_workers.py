"""Compile in worker processes for an sm_80 that is not there: `compile_in_workers.py compile_once | lose_workers`.

`test_compile_pool.py` starts it with a cache of its own. Exits with an error if an assertion fails.
"""

import io
import os
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs

from helpers.dry_launch import empty, launched, on_gpu, pretend_driver
from vllm_latq.kernels.bench.compile_pool import CompilePool, kernels_of
from vllm_latq.kernels.configs import decode_config
from vllm_latq.kernels.decode.launch import Scratch
from vllm_latq.kernels.decode.prefill import launch_dequantize
from vllm_latq.kernels.decode.ssqr import launch_ssqr
from vllm_latq.kernels.layout.weight import KernelWeight

Launches = dict[str, Callable[[], object]]
compiled: list[bool] = []  # for each kernel that this process compiled, whether it came from the cache


def make_launches(weight: KernelWeight) -> tuple[Launches, Callable[[], object]]:
    """Return launches that compile, one that raises among them; and one whose kernel does not compile."""
    config, bf16 = decode_config(1, 2), torch.bfloat16
    x, y = empty(bf16, 1, 256), empty(bf16, 1, 128)

    def fails() -> None:
        raise ValueError("as a launcher does that is given a wrong shape")

    def decode(x: torch.Tensor, y: torch.Tensor) -> Callable[[], object]:
        return partial(launch_ssqr, x, weight, y, config, Scratch())

    launches: Launches = {
        "decode": decode(x, y),
        "fails": fails,
        "dense": partial(launch_dequantize, weight, empty(bf16, 128, 256), 0, 1),
        "decode again": decode(x, y),
        "halves": decode(x.half(), y.half()),
    }
    return launches, decode(x.float(), y)  # launchers leave such checks to `dispatch.py`


def compile_once(launches: Launches, wrong: Callable[[], object]) -> None:
    """Compile each kernel once, whatever another launch ends in."""
    names = [name for _, name, _ in kernels_of([wrong, *launches.values()])]
    assert names == ["ssqr_tensor_core"] * 2 + ["dequantize_tiles", "ssqr_tensor_core"], names
    assert not compiled
    assert not os.listdir(os.environ["TRITON_CACHE_DIR"])
    assert knobs.runtime.jit_cache_hook is None
    with CompilePool(2, pretend_driver) as pool:
        pool.compile([wrong, *launches.values()])
        assert not compiled
        for name in ("decode", "dense", "halves"):
            launches[name]()
        assert compiled == [True] * 3, compiled
        with pytest.raises(triton.CompilationError):
            wrong()
    launched.clear()
    assert kernels_of(launches.values()) == []  # all are compiled in this process, too
    assert launched == [True] * 4, launched
    launches["decode"]()
    assert launched[4:] == [False]


def lose_workers(launches: Launches, _: Callable[[], object]) -> None:
    """Let the workers die: they compile nothing more, and the pool warns once."""
    sys.stderr = io.StringIO()
    with CompilePool(2, sys.exit) as pool:
        pool.compile(launches.values())
        assert sys.stderr.getvalue().startswith("processes that compile kernels died")
        pool.compile(launches.values())
        assert len(sys.stderr.getvalue().splitlines()) == 1
    launches["decode"]()
    assert compiled == [False]


if __name__ == "__main__":  # the workers import this file
    pretend_driver()
    knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(cache_hit)
    weight = on_gpu(128, 256)
    with FakeTensorMode():
        {"compile_once": compile_once, "lose_workers": lose_workers}[sys.argv[1]](*make_launches(weight))
