"""Rows of the benchmark for layers of routed experts: all launches of a layer together, against float64 and the copy.

Every token chooses its experts anew at random, evenly, and every launch has tokens of its own. Bytes are those of the
experts that were chosen, once, so the fraction of the roofline also pays for an expert that has two batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import silu

from vllm_latq.kernels.bench.cases import BITS, KEPT_RATE, Case, Layer, layer_of
from vllm_latq.kernels.bench.measure import Bench, Result
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.kernels.experts.grouped import routed_experts
from vllm_latq.kernels.experts.routing import Stack
from vllm_latq.kernels.layout.trellis import pool_trellis
from vllm_latq.kernels.layout.weight import stack_weights

EXPERTS, CHOSEN, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768  # Qwen3-30B-A3B
RATES = (0.0, 0.01)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 512)
ROUTINGS = 8  # different ones in turn: at one token, other experts each time


@dataclass(frozen=True)
class Batch:
    """x [tokens, hidden], weights and ids [tokens, k]."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class Experts:
    """gate above up, and down: of each expert its layer, and all of them as one weight."""

    layers: tuple[list[Layer[Any]], list[Layer[Any]]]
    stacks: tuple[Stack, Stack]

    def __call__(self, batch: Batch) -> torch.Tensor:
        """Output of the layer for one batch; KernelInputError if the batch is too large for the decode kernel."""
        y = routed_experts(batch.x, batch.weights, batch.ids, self.stacks, len(self.layers[0]), ("silu", ()))
        if y is None:
            raise KernelInputError("tokens", "so few that the decode kernel serves them", str(len(batch.x)))
        return y

    def error(self, batch: Batch) -> float:
        """Largest deviation from the float64 experts, over the largest output; infinite for NaN."""
        expected = torch.zeros(batch.x.shape, dtype=torch.float64, device=batch.x.device)
        for expert in batch.ids.unique().tolist():
            tokens, slots = (batch.ids == expert).nonzero(as_tuple=True)
            gate, up = (batch.x[tokens].double() @ self.layers[0][expert].dense.double().t()).chunk(2, 1)
            outputs = (silu(gate) * up) @ self.layers[1][expert].dense.double().t()
            expected.index_add_(0, tokens, outputs * batch.weights[tokens, slots, None].double())
        error = float((self(batch).double() - expected).abs().max() / expected.abs().max())
        return error if error == error else float("inf")

    def bytes(self, batches: list[Batch]) -> int:
        """Bytes of the experts that a batch needs and of x and y, on average."""
        each = [sum(layer.weight.storage_bytes() for layer in pair) for pair in zip(*self.layers, strict=True)]
        weights = sum(each[expert] for batch in batches for expert in batch.ids.unique().tolist()) // len(batches)
        return weights + 2 * batches[0].x.nbytes


def expert_cases(
    bits: tuple[int, ...] = BITS, rates: tuple[float, ...] = RATES, rows: tuple[int, ...] = TOKENS
) -> Iterator[Case]:
    """Every combination, cases of one layer next to each other. `rows`, a case's m, are tokens.

    A trellis has KEPT_RATE in place of `rates`.
    """
    for width in bits:
        for rate in rates:
            for tokens in rows:
                yield Case(HIDDEN, INTERMEDIATE, width, rate, tokens, "experts")
        for tokens in rows:
            yield Case(HIDDEN, INTERMEDIATE, width, KEPT_RATE, tokens, "trellis_experts")


@dataclass
class ExpertBench(Bench):
    """Rows for whole layers; a case's rows are the hidden size, its columns the intermediate size."""

    experts: int = EXPERTS
    chosen: int = CHOSEN

    def _make(self, case: Case) -> Experts:
        products = (replace(case, rows=2 * case.cols, cols=case.rows), case)
        gate_up, down = ([layer_of(product, self.device, seed) for seed in range(self.experts)] for product in products)
        stack: Callable[[list[Any]], Stack] = pool_trellis if case.is_trellis else stack_weights
        stacks = [stack([layer.weight for layer in layers]) for layers in (gate_up, down)]
        return Experts((gate_up, down), (stacks[0], stacks[1]))

    def _batch(self, case: Case, seed: int) -> Batch:
        generator = torch.Generator(device=self.device).manual_seed(seed)
        options: dict[str, Any] = {"generator": generator, "device": self.device}
        weights, ids = torch.rand(case.m, self.experts, **options).topk(self.chosen)
        x = torch.randn(case.m, case.rows, **options).bfloat16()
        return Batch(x, weights / weights.sum(1, keepdim=True), ids.int())

    def _baselines(self, case: Case, made: Experts) -> Iterator[Result]:
        return iter(())

    def _launch(self, case: Case, made: Experts) -> torch.Tensor:
        return made(self._batch(case, 0))

    def _ours(self, case: Case, made: Experts) -> Result:
        batches = [self._batch(case, seed) for seed in range(ROUTINGS)]
        launches = [partial(made, batch) for batch in batches]
        return self._result(case, case.path, made.error(batches[0]), made.bytes(batches), launches)
