"""Compilation in worker processes: what launches need is found without launching, and is in Triton's cache after it.

For an sm_80 that is not there (dry_launch.py), in a process of its own with a cache of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import io, os, sys
from functools import partial
import torch, triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from helpers.dry_launch import empty, launched, on_gpu, pretend_driver
from vllm_latq.kernels.bench.compile_pool import CompilePool, kernels_of
from vllm_latq.kernels.configs import decode_config
from vllm_latq.kernels.decode.prefill import launch_dequantize
from vllm_latq.kernels.decode.launch import Scratch
from vllm_latq.kernels.decode.ssqr import launch_ssqr

pretend_driver()
weight, config, compiled = on_gpu(128, 256), decode_config(1, 2), []
knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(cache_hit)

def fails():
    raise ValueError("as a launcher does that is given a wrong shape")

with FakeTensorMode():
    x, y = empty(torch.bfloat16, 1, 256), empty(torch.bfloat16, 1, 128)
    decode = partial(launch_ssqr, x, weight, y, config, Scratch())
    halves = partial(launch_ssqr, x.half(), weight, y.half(), config, Scratch())
    dense = partial(launch_dequantize, weight, empty(torch.bfloat16, 128, 256), 0, 1)  # two kernels
    launches = [decode, fails, dense, decode, halves]
"""
PARTS = {
    "each kernel is compiled once, whatever another ends in": """
    wrong = partial(launch_ssqr, x.float(), weight, y, config, Scratch())  # launchers leave such checks to dispatch
    kernels = kernels_of([wrong, *launches])
    names = [name for _, name, _ in kernels]
    assert names == ["ssqr_tensor_core"] * 2 + ["dequantize_tiles", "scatter_outliers", "ssqr_tensor_core"], names
    assert not compiled and not os.listdir(os.environ["TRITON_CACHE_DIR"])
    assert knobs.runtime.jit_cache_hook is None
    with CompilePool(2, pretend_driver) as pool:
        pool.compile([wrong, *launches])
        assert not compiled
        for launch in (decode, dense, halves):
            launch()
        assert compiled == [True] * 4, compiled
        try:
            wrong()
        except triton.CompilationError:
            pass
        else:
            raise AssertionError("as if nothing were wrong with it")
    launched.clear()
    assert kernels_of(launches) == []  # all are compiled in this process, too
    assert launched == [True] * 5, launched
    decode()
    assert launched[5:] == [False]
""",
    "workers that die compile nothing more": """
    sys.stderr = io.StringIO()
    with CompilePool(2, sys.exit) as pool:
        pool.compile(launches)
        assert sys.stderr.getvalue().startswith("processes that compile kernels died")
        pool.compile(launches)
        assert len(sys.stderr.getvalue().splitlines()) == 1
    decode()
    assert compiled == [False]
""",
}


@pytest.mark.parametrize("what", PARTS)
def test_workers(what: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"], environment["TRITON_CACHE_DIR"] = os.pathsep.join(sys.path), str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT + PARTS[what]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
