"""Plan a run from shapes alone: what a recipe makes of a model, and the bytes that this needs. Nothing is computed.

`needs` counts exactly the bytes listed here. A run also holds the libraries, intermediates of one batch and of one
linear, what some models hand from block to block beside one stream of hidden states, and with target "residual" one
more sum [c, r] per block.

    memory  block        weights of the largest block, in the compute dtype
            outside      weights outside the blocks, in the compute dtype: embeddings, norms and head. An untied head
                         and the embeddings are not loaded at the same time
            hessians     float32 [c, c] per input of the linears of one block: X^T X; two more sums of this shape where
                         targets are corrected; latq then keeps X^T X of the original model, too. q, k and v share one
                         input, and so do gate and up; all other linears count as if each had its own
            gradients    float32 [r, r] per linear of that block (latq): the gram G of its
                         output gradients, in diagonal blocks of at most LARGEST_BLOCK outputs. The experts of a layer
                         share theirs
            activations  num_samples * seq_len * hidden_size * streams in the compute dtype, for each copy that waits:
                         one; two where targets are corrected; the inputs of all blocks and the outputs of the last
                         where gradients are needed. Where statistics are made again, two more if targets are
                         corrected, else one more if the KV cache has scales. With --offload disk they wait on disk
            peak         the largest sum of these at one time: of the weights outside the blocks and activations, or of
                         everything else
    disk    statistics   the tensors of all statistics files, which are removed at the end: one X^T X per input, and
                         every G; none where they are made again
            checkpoint   the tensors of the checkpoint: the quantized linears, as planned, and all that stays as it is
    reads   model        the files of the model as often as a run reads them, about: READS times for latq, else once
            statistics   the statistics files, once for each round of the allocation and once while rounding

The block of `hessians` and `gradients` is the one whose sum is largest; the head is one more, if it is quantized.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.quantize.allocation.model_lattice import ALLOCATIONS
from vllm_latq.quantize.allocation.widths import require_bits
from vllm_latq.quantize.calibration.gram_sums import gram_bytes
from vllm_latq.quantize.calibration.recomputed import made_again, statistics_bytes
from vllm_latq.quantize.calibration.windows import check_seq_len
from vllm_latq.quantize.methods.record import totals
from vllm_latq.quantize.model.anatomy import parts_outside
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import compute_dtype, torch_device
from vllm_latq.quantize.model.parts import model_parts
from vllm_latq.quantize.model.selection import beside, matrices, quantized_linears, rounded_matrices, suited
from vllm_latq.quantize.recipe import AVERAGE_METHODS, Recipe

# Passes of latq over the weights: forward, backward, two rounds of the allocation, rounding.
READS = 3 + ALLOCATIONS
# Names under which configurations have the number of streams of hidden states (DeepSeek-V4, GLM-5-Next; Gemma 3n).
STREAMS = ("hc_mult", "altup_num_inputs")
# Keys of the totals that only a run can measure.
NOT_PLANNED = ("served_bits_per_weight", "error", "bound", "loss", "loss_bound")


def plan(
    recipe: Recipe,
    source: str | Path,
    device: str | None = None,
    offload: str = "cpu",
    calibrated: bool = False,
) -> dict[str, Any]:
    """Return name, shape, expected stored bits per weight and bytes of each linear, their totals, and what a run needs.

    `rounded` has the bytes of the matrices beside these linears that are rounded to nearest; `unquantized` lists all
    other matrices of the model except embeddings; `beside` the modules beside the language model; `needs` the bytes in
    memory and on disk, see above.

    Args:
        recipe: what to do.
        source: model directory.
        device: torch device of the run, which decides the compute dtype; None takes CUDA where there is one.
        offload: where activations wait, "cpu" or "disk".
        calibrated: whether a method that needs no calibration text is given one, to measure errors.

    Bits are exact for schemes without outliers, at the outlier rate for SSQR, and the target for entropy coding: of
    what is in memory where the recipe counts that.
    """
    decoder = Decoder(source, torch_device(device), compute_dtype(recipe.dtype))
    recipe = suited(recipe, decoder)
    layers = []
    quantized = quantized_linears(decoder, recipe)
    require_bits(quantized, recipe)
    reads_text = recipe.needs_text or calibrated
    if reads_text:
        check_seq_len(decoder, recipe)
    for name, linear in quantized.items():
        rows, cols = linear.out_features, linear.in_features
        bits = planned_bits(recipe, rows, cols) / (rows * cols)
        layers.append({"name": name, "shape": [rows, cols], "bits": bits, "bytes": round(bits * rows * cols / 8)})
    summary = {key: value for key, value in totals(layers).items() if key not in NOT_PLANNED}
    left = [
        {"name": name, "shape": list(shape)}
        for name, shape in matrices(decoder).items()
        if name.removesuffix(".weight") not in quantized
    ]
    others = [
        {"name": name, "matrices": len(shapes), "weights": sum(map(math.prod, shapes))}
        for name, shapes in beside(decoder).items()
    ]
    needs = _needs(decoder, recipe, quantized, reads_text)
    activations = needs["memory"].pop("activations")
    needs["disk" if offload == "disk" else "memory"]["activations"] = activations
    rounded = rounded_bytes(decoder, recipe, quantized)
    needs["memory"]["peak"] = peak(needs["memory"])
    needs["disk"]["checkpoint"] = summary["bytes"] + _untouched_bytes(decoder, quantized, rounded)
    return {
        "recipe": recipe.to_dict(),
        "totals": summary,
        "layers": layers,
        "rounded": rounded,
        "unquantized": left,
        "beside": others,
        "needs": needs,
    }


def peak(memory: Mapping[str, int]) -> int:
    """Return the most bytes in memory at one time; `memory` as in `needs`."""
    at_work = memory["block"] + memory["hessians"] + memory["gradients"]
    return max(memory["outside"], at_work) + memory.get("activations", 0)


def disk_bytes(
    decoder: Decoder, recipe: Recipe, quantized: Mapping[str, nn.Linear], reads_text: bool, offload: str
) -> int:
    """Return the bytes that a run writes to its destination: the checkpoint, statistics and offloaded activations.

    Args:
        decoder: the model.
        recipe: what to do.
        quantized: full name -> linear of everything that the recipe quantizes.
        reads_text: whether there is a calibration text.
        offload: where activations wait, "cpu" or "disk".
    """
    needs = _needs(decoder, recipe, quantized, reads_text)
    waiting = needs["memory"]["activations"] if offload == "disk" else 0
    bits = sum(planned_bits(recipe, linear.out_features, linear.in_features) for linear in quantized.values())
    rounded = rounded_bytes(decoder, recipe, quantized)
    return round(bits / 8) + _untouched_bytes(decoder, quantized, rounded) + needs["disk"]["statistics"] + waiting


def planned_bits(recipe: Recipe, rows: int, cols: int) -> float:
    """Return the stored bits of a linear [rows, cols].

    The target for entropy-coded methods; for the others exact, except that outliers count at their rate.
    """
    if recipe.method in AVERAGE_METHODS:
        return recipe.bits * rows * cols
    outliers = recipe.outlier_rate * rows * cols
    return sum(spec.bits(outliers) for spec in tensor_specs(recipe.scheme, rows, cols).values())


def _needs(
    decoder: Decoder, recipe: Recipe, quantized: Mapping[str, nn.Linear], reads_text: bool
) -> dict[str, dict[str, int]]:
    """Return `needs` without the checkpoint, activations in memory."""
    blocks = [decoder.model.get_submodule(decoder.block_name(index)) for index in range(len(decoder))]
    outside = parts_outside(decoder.model, "", (decoder.anatomy.blocks, *decoder.anatomy.towers))
    sees_loss = recipe.method == "latq"
    corrected = recipe.target != "quantized"
    grams = [gram_bytes(part.linears) for part in model_parts(decoder, quantized)]
    sums = 3 * corrected + (recipe.method == "latq" or not corrected)  # of each input
    hessians, gradients = max(((sums * inputs, sees_loss * outputs) for inputs, _, outputs in grams), key=sum)
    again = sees_loss and made_again(decoder, quantized)
    streamed = 1 + corrected  # copies of a text that passes through the quantized blocks
    copies = len(decoder) + 1 + streamed * (again and recipe.passes_text) if sees_loss else streamed
    statistics = 0 if again or not sees_loss else statistics_bytes(decoder, quantized)
    files = set(decoder.store.files.values())
    text = decoder.config.get_text_config()
    hidden = recipe.num_samples * recipe.seq_len * text.hidden_size * streams(text)
    return {
        "memory": {
            "block": max(_nbytes(block.modules()) for block in blocks),
            "outside": _nbytes(part for _, part in outside),
            "hessians": reads_text * hessians,
            "gradients": gradients,
            "activations": reads_text * copies * hidden * decoder.dtype.itemsize,
        },
        "disk": {"statistics": statistics},
        "reads": {
            "model": (READS if sees_loss else 1) * sum((decoder.source / file).stat().st_size for file in files),
            "statistics": (1 + ALLOCATIONS) * statistics,
        },
    }


def streams(text: Any) -> int:
    """Return the number of streams of hidden states of a model, from the configuration of its language model."""
    return next((getattr(text, name) for name in STREAMS if getattr(text, name, None)), 1)


def _nbytes(modules: Iterable[nn.Module]) -> int:
    """Return the bytes of the modules' own parameters and buffers; a tensor that several modules share counts once."""
    own = (tensor for one in modules for tensor in (*one.parameters(recurse=False), *one.buffers(recurse=False)))
    return sum({id(tensor): tensor.nbytes for tensor in own}.values())


def rounded_bytes(decoder: Decoder, recipe: Recipe, quantized: Collection[str]) -> dict[str, int]:
    """Return name -> stored bytes of each matrix beside the linears that is rounded to nearest."""
    found = {}
    for name, scheme in rounded_matrices(decoder, recipe, quantized).items():
        rows, cols = decoder.store.shape(f"{name}.weight")
        found[name] = round(sum(spec.bits() for spec in tensor_specs(scheme, rows, cols).values()) / 8)
    return found


def _untouched_bytes(decoder: Decoder, quantized: Mapping[str, nn.Linear], rounded: Mapping[str, int]) -> int:
    """Return the bytes of the tensors that are no linears: as they are, or rounded to nearest."""
    size, left = sum(rounded.values()), {f"{name}.weight" for name in rounded}
    for part in model_parts(decoder, quantized):
        size += sum(decoder.store.get(name).nbytes for name in part.untouched_names() if name not in left)
        decoder.store.close()
    return size
