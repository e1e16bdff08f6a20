"""The weights of several experts as the kernels take them."""

import torch

from helpers.kernel_device import DEVICE
from vllm_latq.kernels.layout.weight import KernelWeight, prepare, stack_weights


def stack_of_experts(experts: int, bits: int = 3) -> KernelWeight:
    """64 by 64 each, all the same."""
    codes = torch.zeros(64, 64 * bits // 32, dtype=torch.int32, device=DEVICE)
    return stack_weights([prepare(codes, bits, -1, 64)] * experts)
