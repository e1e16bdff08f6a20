"""The one entry point: y = x W^T for any number of rows.

CUDA-graph safe: no host synchronisation, no autotuning, scratch from the caching allocator, tickets left at zero.
"""

import torch

from vllm_latq.kernels.configs import DecodeConfig, decode_config
from vllm_latq.kernels.errors import require
from vllm_latq.kernels.ssqr import launch_ssqr
from vllm_latq.kernels.weight import KernelWeight

OUTLIER_GATHER_ROWS = 8  # above, outliers read a transposed copy of x: one vector load per outlier instead of one a row


def check_activations(x: torch.Tensor, weight: KernelWeight) -> None:
    """Cheap checks of shape, dtype and device; no synchronisation."""
    require(x.dtype in (torch.bfloat16, torch.float16), "x", "bfloat16 or float16", x.dtype)
    require(x.shape[-1] == weight.cols, "x", f"{weight.cols} columns", tuple(x.shape))
    require(x.device == weight.words.device, "x", f"a tensor on {weight.words.device}", x.device)


def decode_matmul(
    x: torch.Tensor, weight: KernelWeight, config: DecodeConfig, parts: int | None = None
) -> torch.Tensor:
    """y [m, rows] for 1 <= m <= config.max_rows rows of x [m, cols], by one fused launch."""
    m = x.shape[0]
    if x.stride(1) != 1:
        x = x.contiguous()
    if parts is None:
        parts = config.parts(weight.padded_rows, weight.superblocks, weight.processors)
    y = torch.empty(m, weight.rows, dtype=x.dtype, device=x.device)
    partials = transposed = None
    if parts > 1:
        partials = torch.empty(parts * weight.padded_rows * config.max_rows, dtype=torch.float32, device=x.device)
    if weight.entries is not None and m > OUTLIER_GATHER_ROWS:
        transposed = torch.empty(weight.cols, config.max_rows, dtype=x.dtype, device=x.device)
        transposed[:, :m] = x.t()
    launch_ssqr(x, weight, y, partials, transposed, config, parts)
    return y


def ssqr_matmul(x: torch.Tensor, weight: KernelWeight, config: DecodeConfig | None = None) -> torch.Tensor:
    """x W^T, accumulated in float32 and rounded once.

    Args:
        x: [..., cols], bfloat16 or float16, on the weight's device.
        weight: from `prepare`.
        config: overrides the table, for measurements.

    Returns:
        [..., rows], dtype of x.

    Raises:
        KernelInputError: x does not fit the weight.
    """
    check_activations(x, weight)
    flat = x.reshape(-1, weight.cols)
    if flat.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], weight.rows)
    config = config or decode_config(flat.shape[0])
    return decode_matmul(flat, weight, config).view(*x.shape[:-1], weight.rows)
