"""Scales of a KV cache in 8-bit floats, from the largest keys and values that the calibration text puts into the cache.

    attention layer --(key after norm and rotation, value)--> attention function of transformers

A server caches exactly what the attention function gets, and stores key / k_scale and value / v_scale as float8_e4m3.

Invariant: every block that attends has a scale of keys and one of values, or the run ends with an error that names it.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vllm_latq.errors import NumericalError, UnsupportedModelError
from vllm_latq.quantize.machine.distributed import World
from vllm_latq.quantize.model.decoder import Decoder

# The largest float8_e4m3 number.
LARGEST = 448.0
# Attention implementations of transformers that a model chooses from where nothing is asked for.
IMPLEMENTATIONS = ("sdpa", "eager")


class KeyValueRanges:
    """The largest magnitudes of keys and values of each attention layer, over everything that passes.

    Args:
        decoder: whose blocks the text passes.
        attends: for each block, whether it has a KV cache.
    """

    def __init__(self, decoder: Decoder, attends: Sequence[bool]) -> None:
        self.decoder, self.attends = decoder, attends
        self.names = {id(module): name for name, module in decoder.model.named_modules()}
        self.largest: dict[str, torch.Tensor] = {}  # name in the checkpoint -> float32 [2], of keys and of values
        self.reached = False  # whether the block that runs has called an attention function

    @contextmanager
    def watching(self, index: int) -> Iterator[None]:
        """Record what the attention layers of a block get while it runs; raise unless a block that attends has one."""
        self.reached = False
        for name in IMPLEMENTATIONS:
            ALL_ATTENTION_FUNCTIONS[name] = self._recording(ALL_ATTENTION_FUNCTIONS.get(name))
        try:
            yield
        finally:
            for name in IMPLEMENTATIONS:
                del ALL_ATTENTION_FUNCTIONS[name]
        if self.attends[index] and not self.reached:
            expected = "attention that transformers computes by a function of its own interface"
            hint = "Its keys and values cannot be measured: leave out --kv-cache-scheme."
            raise UnsupportedModelError(self.decoder.block_name(index), expected, "another attention", hint)

    def tensors(self, world: World) -> dict[str, torch.Tensor]:
        """Return name -> scale, float32 [1], of all attention layers, for the text of all processes.

        Raises:
            NumericalError: keys or values that are infinite or NaN, or all zero.
        """
        shares = world.gather(lambda: {name: largest.cpu() for name, largest in self.largest.items()})
        scales = {}
        for name in self.largest:
            largest = torch.stack([share[name] for share in shares]).amax(0)
            if not bool((largest.isfinite() & (largest > 0)).all()):
                found = f"at most {largest.tolist()} in magnitude"
                raise NumericalError(name, "keys and values that are finite, and not all zero", found)
            for leaf, scale in zip(("k_scale", "v_scale"), (largest / LARGEST).split(1), strict=True):
                scales[f"{name}.{leaf}"] = scale
        return scales

    def _recording(self, function: Callable[..., Any] | None) -> Callable[..., Any]:
        def record(module: nn.Module, query: Any, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any) -> Any:
            name, self.reached = self._stored(self.names[id(module)]), True
            largest = torch.stack([key.abs().amax(), value.abs().amax()]).float()
            self.largest[name] = largest.maximum(self.largest.get(name, largest))
            # The default of transformers' interface is a function beside the attention layer.
            own = function or vars(sys.modules[type(module).__module__])["eager_attention_forward"]
            return own(module, query, key, value, *args, **kw)

        return record

    def _stored(self, name: str) -> str:
        """Return the name in the checkpoint of a module without a weight of its own, from the names of its tensors."""
        for inside, stored in self.decoder.stored.items():
            leaf = inside.removeprefix(f"{name}.")
            if leaf != inside and stored.endswith(f".{leaf}"):
                return stored.removesuffix(f".{leaf}")
        expected, hint = "an attention layer whose tensors keep their names", "Leave out --kv-cache-scheme."
        raise UnsupportedModelError(name, expected, "tensors that are stored under other names", hint)
