"""The device on which tests run kernels: a GPU, or without one what an environment variable chooses.

TRITON_INTERPRET=1    on the CPU, in Triton's interpreter; Triton reads this when it is imported
EMULATED_GPU=sm_80    on a pretended GPU of this architecture, whose kernels are compiled and run in the PTX emulator
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from helpers.pretend_gpu import host, pretend_gpu
from helpers.quick_interpreter import patch_once_per_launch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EMULATED = os.environ.get("EMULATED_GPU")


@contextmanager
def emulated_gpu(arch: str) -> Iterator[None]:
    """Pretend a GPU that launches this package's kernels in the emulator."""
    from vllm_latq.kernels.dev.emulation import (
        launch,  # which imports Triton, for tests that only ask whether there is one
    )

    read, capability = launch._bytes, divmod(int(arch.removeprefix("sm_")), 10)
    with (
        patch.object(launch, "_bytes", lambda tensor: read(host(tensor))),
        pretend_gpu(*capability),
        launch.emulation(arch),
    ):
        yield


if EMULATED:
    assert not INTERPRETED, "choose one of TRITON_INTERPRET and EMULATED_GPU"
    _whole_process = emulated_gpu(EMULATED)
    _whole_process.__enter__()
if INTERPRETED:
    patch_once_per_launch()
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
RUNNABLE = INTERPRETED or DEVICE.type == "cuda"
# The name that the kernels give the device: empty without a GPU, one name for all of AMD's.
CAPABILITY = torch.cuda.get_device_capability() if DEVICE.type == "cuda" else ()
ARCH = "hip" if CAPABILITY and torch.version.hip else "sm_{}{}".format(*CAPABILITY) if CAPABILITY else ""
