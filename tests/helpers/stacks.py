"""The weights of several experts as the kernels take them."""

import torch
from kernel_device import DEVICE

from vllm_latq.kernels.weight import KernelWeight, prepare


def stack_of_experts(experts: int, bits: int = 3, midrise: bool = False) -> KernelWeight:
    """Shapes only: the first expert's tensors stand for all."""
    codes = torch.zeros(64, 64 * bits // 32, dtype=torch.int32, device=DEVICE)
    weight = prepare(codes, bits, -1, 64, midrise=midrise)
    parts = {name: part for name, part in vars(weight).items() if isinstance(part, torch.Tensor)}
    stacks = {name: part.expand(experts, *part.shape) for name, part in parts.items()}
    return KernelWeight(**vars(weight) | stacks)
