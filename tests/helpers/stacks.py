"""Weights of several experts in the form that the kernels take."""

import torch

from helpers.kernel_device import DEVICE
from vllm_latq.kernels.layout.weight import KernelWeight, prepare, stack_weights


def stack_of_experts(experts: int, bits: int = 3) -> KernelWeight:
    """Return equal experts of 64 by 64 zeros."""
    codes = torch.zeros(64, 64 * bits // 32, dtype=torch.int32, device=DEVICE)
    return stack_weights([prepare(codes, bits, -1, 64)] * experts)
