"""Which linear of a block is the last to add its outputs to the residual stream: found by adding noise to them.

    hidden ──> + attention ──> + MLP, which ends in down_proj ──> hidden of the next block

Where the block's outputs move by that noise, times one factor (some models scale what a branch adds), what this linear
writes can take back what the quantized prefix has done to the stream. Where a norm follows it, or experts share the
work, it cannot.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from vllm_latq.quantize.calibration.hessian import recording

# Share of the noise by which the outputs of a token may miss it: rounding of bfloat16, at the size of the outputs.
TOLERANCE = 0.05


@dataclass(frozen=True)
class LastWriter:
    """A linear whose outputs, times `factor`, are the last that its block adds to the residual stream."""

    name: str
    factor: float


def last_writer(linears: Mapping[str, nn.Linear], run: Callable[[], torch.Tensor]) -> LastWriter | None:
    """The one of a block's linears that is called last, if it writes to the residual stream and alone reads its input.

    Args:
        linears: name -> linear.
        run: passes some tokens through the block: hidden states [n, tokens, h] behind it.
    """
    with recording(linears) as inputs:
        behind = run()
    if not inputs:
        return None
    name, read = list(inputs.items())[-1]
    if linears[name].out_features != behind.shape[-1] or sum(other is read for other in inputs.values()) > 1:
        return None
    # As large as most of a token's channels: beside the few huge ones that some tokens have, a norm would hide it.
    usual = behind.float().abs().median(dim=-1, keepdim=True).values
    noise = torch.randn(behind.shape, generator=torch.Generator().manual_seed(0)).to(behind.device) * usual
    noise, calls = noise.to(behind.dtype), 0

    def add(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return output + noise.to(output.device).reshape(output.shape)

    handle = linears[name].register_forward_hook(add)
    try:
        moved = run().float() - behind.float()
    finally:
        handle.remove()
    noise = noise.float()
    factor = float(((moved * noise).sum(-1) / noise.square().sum(-1)).median())
    missed = float(((moved - factor * noise).norm(dim=-1) / noise.norm(dim=-1)).median())
    return LastWriter(name, factor) if calls == 1 and factor > 0 and missed <= TOLERANCE * factor else None
