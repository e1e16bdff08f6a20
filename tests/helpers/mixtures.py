"""Small mixtures of experts: on quantized weights with a dense reference, with an unused expert, and stored fused."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from helpers.builders import random_weight
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.weight import IntegerWeight
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.models.experts import is_interleaved, is_transposed
from vllm_latq.serving.experts import ACTIVATIONS, expert_constants, run_experts
from vllm_latq.serving.merging import Merged, merge
from vllm_latq.serving.operands import make_operands, stack_operands

EXPERTS, HIDDEN, INTERMEDIATE = 5, 96, 64


# Constants of the activations that take them: a clamp that many random values reach, and gpt-oss's alpha and beta.
CONSTANTS = {"swiglu": (0.5, 1.702, 1.0), "swiglustep": (0.25,)}


class Mixture:
    """Random experts: operands for the operator on a device, and dense matrices for the reference on the CPU."""

    def __init__(
        self,
        scheme: LayerScheme,
        dtype: torch.dtype = torch.float32,
        activation: str = "silu",
        device: Any = "cpu",
        biased: bool = False,
    ) -> None:
        self.dense: list[list[torch.Tensor]] = []
        self.stacks, operands = [], []
        first = INTERMEDIATE if activation.endswith("_no_mul") else 2 * INTERMEDIATE
        for product, (rows, cols) in enumerate(((first, HIDDEN), (HIDDEN, INTERMEDIATE))):
            served = [self._served(scheme, rows, cols, seed=10 * product + expert) for expert in range(EXPERTS)]
            self.dense.append([weight.dequantize() for weight in served])
            made = [make_operands(weight.to(device), dtype, "experts", alone=False) for weight in served]
            stack = stack_operands(made, "experts")
            self.stacks.append([*stack.tensors().values()])
            operands.append(stack)
        constants = CONSTANTS.get(activation, ())
        self.constants = expert_constants(operands[0], operands[1], EXPERTS, activation, constants)
        self.activation = lambda y: ACTIVATIONS[activation](y, *constants)
        generator = torch.Generator().manual_seed(7)
        sizes = (first, HIDDEN) if biased else ()
        # Numbers that float16 holds exactly.
        biases = [torch.randint(-8, 9, (EXPERTS, size), generator=generator) / 16 for size in sizes]
        self.dense_biases: list[Any] = biases or [[None] * EXPERTS] * 2
        self.biases = [bias.to(device, dtype) for bias in biases]

    @staticmethod
    def _served(scheme: LayerScheme, rows: int, cols: int, seed: int) -> Merged:
        weight = random_weight(scheme, rows, cols, seed)
        bits = None if isinstance(weight, PackedWeight) else 3
        # Not by the Huffman kernel, which takes a minute for these experts in Triton's interpreter.
        integers = weight.decode("expert") if isinstance(weight, IntegerWeight) else None
        return merge([("expert", weight)], [integers], torch.device("cpu"), bits)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return what the operator computes."""
        return run_experts(x, weights, ids, self.stacks[0], self.stacks[1], self.biases, self.constants)

    def run(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the outputs of one dense expert."""
        first, second = ((self.dense[n][expert], self.dense_biases[n][expert]) for n in range(2))
        return functional.linear(self.activation(functional.linear(x, *first)), *second)

    def reference(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen dense experts; ids outside the range are on other ranks."""
        y = torch.zeros(x.shape)
        for token, row in enumerate(ids.tolist()):
            for slot, expert in enumerate(row):
                if 0 <= expert < EXPERTS:
                    y[token] += weights[token, slot] * self.run(x[token], expert)
        return y


def routing(tokens: int, k: int, dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, weights and ids; no token chooses expert 3, and every third token has one expert on another rank."""
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.tensor([0, 1, 2, 4])
    ids = torch.stack([chosen[torch.randperm(4, generator=generator)[:k]] for _ in range(tokens)]).to(dtype)
    ids[::3, 0] = -1
    return torch.randn(tokens, HIDDEN, generator=generator), torch.rand(tokens, k, generator=generator), ids


def never_choose(model: Path, expert: int) -> None:
    """Let no token choose an expert: change the first router of a saved mixtral that has one expert per token."""
    tensors = load_file(model / "model.safetensors")
    gate = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    first, second, *_ = (row for row in range(len(gate)) if row != expert)
    gate[second], gate[expert] = -gate[first], 0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def fuse_experts(model: Path, transposed: bool = False) -> None:
    """Store the experts of each layer of a saved model as one tensor, the way many are published.

    Args:
        model: directory, of experts stored one by one or fused in rows.
        transposed: the last two dimensions are exchanged.
    """
    stored, fused = load_file(model / "model.safetensors"), {}
    single: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    for name, tensor in stored.items():
        if found := re.fullmatch(r"(.*experts)\.(\d+)\.(\w+)\.weight", name):
            single.setdefault(found[1], {})[int(found[2]), found[3]] = tensor
        else:
            fused[name] = tensor
    for name, matrices in single.items():
        readers = [leaf for leaf in ("gate_proj", "up_proj") if (0, leaf) in matrices]
        count = len(matrices) // (len(readers) + 1)
        first = [torch.cat([matrices[n, leaf] for leaf in readers]) for n in range(count)]
        fused[f"{name}.{'gate_up_proj' if len(readers) > 1 else 'up_proj'}"] = torch.stack(first)
        fused[f"{name}.down_proj"] = torch.stack([matrices[n, "down_proj"] for n in range(count)])
    for name in fused:
        if transposed and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            fused[name] = fused[name].transpose(1, 2).contiguous()
    save_file(fused, model / "model.safetensors", metadata={"format": "pt"})


def into_fused(model: Any, checkpoint: Path, names: Mapping[str, str] = MappingProxyType({})) -> None:
    """Copy the dequantized weights of a checkpoint into a transformers model that stores its experts fused.

    `names` maps a module of the checkpoint to the module of the model, where they differ.
    """
    reader = CheckpointReader(checkpoint)
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name in reader.shapes:
            own = names.get(name, name)
            parent, _, leaf = own.rpartition(".")
            weight = reader.weight(name).dequantize()
            if own in modules:
                modules[own].weight.copy_(weight)
                continue
            experts, _, expert = parent.rpartition(".")
            fused = modules[experts].gate_up_proj if leaf != "down_proj" else modules[experts].down_proj
            if is_transposed(modules[experts]):
                fused = fused.transpose(1, 2)
            rows = len(weight)
            if leaf != "down_proj" and is_interleaved(modules[experts]):
                fused[int(expert), leaf == "up_proj" :: 2].copy_(weight)
                continue
            start = rows if leaf == "up_proj" else 0
            fused[int(expert), start : start + rows].copy_(weight)
