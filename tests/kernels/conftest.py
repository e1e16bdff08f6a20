"""Kernel tests. Those marked `kernel` run on a GPU, in the interpreter or in the emulator: see `kernel_device.py`.

Triton's interpreter is chosen before Triton is imported, so tests marked `interpreter` and `compiler` never run in one
process.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from helpers.kernel_device import DEVICE, INTERPRETED, RUNNABLE
from vllm_latq.kernels.dev.reference import dequantize_reference
from vllm_latq.kernels.layout.codes import codes_to_stream
from vllm_latq.kernels.layout.outliers import OutlierCsr
from vllm_latq.kernels.layout.weight import KernelWeight, prepare

# Triton's interpreter truncates to bfloat16, so it errs by a whole unit in the last place; GPUs round, half a unit.
INTERPRETED_DECODE_TOLERANCE = 2**-7


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernel: launches kernels: on a GPU, in the interpreter or in the emulator")
    config.addinivalue_line("markers", "interpreter: needs TRITON_INTERPRET=1 before triton is imported")
    config.addinivalue_line("markers", "compiler: needs Triton's compiler, which TRITON_INTERPRET=1 replaces")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skipped = {
        "kernel": (not RUNNABLE, "needs a GPU, TRITON_INTERPRET=1 or EMULATED_GPU=sm_80"),
        "interpreter": (not INTERPRETED, "needs TRITON_INTERPRET=1"),
        "compiler": (INTERPRETED, "needs Triton's compiler: run without TRITON_INTERPRET"),
    }
    for item in items:
        for marker, (skip, reason) in skipped.items():
            if skip and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@dataclasses.dataclass(frozen=True)
class Layer:
    """A random layer: checkpoint tensors and float64 weights on the CPU, and prepared where its test runs kernels."""

    tensors: dict
    dense: torch.Tensor
    weight: KernelWeight


@pytest.fixture
def make_layer(request: pytest.FixtureRequest) -> Callable[..., Layer]:
    """Build a random layer: make_layer(bits, rows, cols, group_size=128, outliers=0.01, ...).

    Without scales its outliers are integers beyond the grid, most of them near.
    `empty_outliers`: the scheme has outliers, but there are none.
    """
    device = DEVICE if request.node.get_closest_marker("kernel") else "cpu"

    def make(
        bits: int,
        rows: int,
        cols: int,
        group_size: int = 128,
        outliers: float = 0.01,
        scales: bool = True,
        row_scales: bool = False,
        seed: int = 0,
        full_rows: tuple[int, ...] = (),
        empty_outliers: bool = False,
        midrise: bool = False,
    ) -> Layer:
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 2**bits, (rows, cols), generator=generator, dtype=torch.uint8)
        groups = 1 if group_size == -1 else cols // group_size
        mask = torch.rand(rows, cols, generator=generator) < outliers
        mask[list(full_rows)] = True
        codes[mask] = 2 ** (bits - 1)
        row_ptr = torch.zeros(rows + 1, dtype=torch.int32)
        row_ptr[1:] = mask.sum(1).cumsum(0)
        has_outliers = bool(outliers or full_rows or empty_outliers)
        group_scales = (torch.rand(rows, groups, generator=generator) * 0.02 + 0.005).bfloat16()
        group_scales[1::3] *= -1
        values = torch.randn(int(mask.sum()), generator=generator)
        if not scales:
            far = (values.abs() * 4).square().floor()
            values = torch.where(values < 0, -(2 ** (bits - 1)) - 1 - far, 2 ** (bits - 1) + far)
        tensors = {
            "qweight": codes_to_stream(codes, bits),
            "bits": bits,
            "group_size": group_size,
            "cols": cols,
            "scales": group_scales if scales else None,
            "row_scales": torch.rand(rows, generator=generator) + 0.5 if row_scales else None,
            "row_ptr": row_ptr if has_outliers else None,
            "col_idx": mask.nonzero()[:, 1].to(torch.int32) if has_outliers else None,
            "values": values.to(torch.bfloat16 if scales else torch.float32) if has_outliers else None,
            "midrise": midrise,
        }
        there = {name: part.to(device) if isinstance(part, torch.Tensor) else part for name, part in tensors.items()}
        csr = tuple(tensors[name] for name in ("row_ptr", "col_idx", "values"))
        plain = {name: part for name, part in tensors.items() if name not in ("row_ptr", "col_idx", "values")}
        dense = dequantize_reference(**plain, outliers=csr if has_outliers else None)
        on_device = [there.pop(name) for name in ("row_ptr", "col_idx", "values")]
        weight = prepare(**there, outliers=OutlierCsr(*on_device) if has_outliers else None)
        return Layer(tensors, dense, weight)

    return make


@pytest.fixture
def truncated_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept from decode kernels the outputs that the interpreter truncates."""
    monkeypatch.setattr("vllm_latq.kernels.bench.cases.DECODE_TOLERANCE", INTERPRETED_DECODE_TOLERANCE)
