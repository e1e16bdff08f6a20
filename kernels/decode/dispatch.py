"""The entry point: y = x W^T for any number of rows.

CUDA-graph safe: no host synchronisation, no autotuning, scratch from the caching allocator, tickets left at zero.
"""

import torch

from vllm_latq.kernels.configs import (
    FUSED_LAUNCHES,
    GATHER_ROWS,
    INVARIANT_ROWS,
    TRELLIS,
    TRELLIS_LAUNCHES,
    TRELLIS_REGIMES,
    DecodeConfig,
    TrellisConfig,
    decode_config,
    max_decode_rows,
    split_k,
)
from vllm_latq.kernels.decode.launch import Scratch
from vllm_latq.kernels.decode.prefill import prefill_matmul
from vllm_latq.kernels.decode.simt import launch_simt
from vllm_latq.kernels.decode.spread import is_spread, launch_spread
from vllm_latq.kernels.decode.ssqr import launch_ssqr
from vllm_latq.kernels.decode.trellis import TrellisScratch, launch_trellis
from vllm_latq.kernels.decode.trellis_prefill import prefill_trellis
from vllm_latq.kernels.errors import require
from vllm_latq.kernels.layout.fields import SUPERBLOCK
from vllm_latq.kernels.layout.trellis import TILE_ROWS, TrellisOperands
from vllm_latq.kernels.layout.weight import KernelWeight

MAX_OFFSET = 2**31 - 1  # the kernels use 32-bit offsets for x, and 64-bit offsets for everything that can be larger


def check_activations(x: torch.Tensor, weight: KernelWeight | TrellisOperands) -> None:
    """Refuse x that does not fit the weight, from shape, dtype and device alone: no synchronisation."""
    require(x.dtype in (torch.bfloat16, torch.float16), "x", "bfloat16 or float16", x.dtype)
    require(x.ndim > 0 and x.shape[-1] == weight.cols, "x", f"{weight.cols} columns", tuple(x.shape))
    require(x.device == weight.words.device, "x", f"a tensor on {weight.words.device}", x.device)


def padded_columns(x: torch.Tensor, weight: KernelWeight) -> torch.Tensor:
    """Return x with zero columns up to whole superblocks; x itself if it has none missing."""
    missing = weight.superblocks * SUPERBLOCK - weight.cols
    return torch.nn.functional.pad(x, (0, missing)) if missing else x  # torch copies even where nothing is missing


def allocate_scratch(
    x: torch.Tensor,
    weight: KernelWeight,
    config: DecodeConfig,
    m: int,
    batches: int = 1,
    usual_batches: int | None = None,
) -> Scratch:
    """Choose how to cut the columns for one launch, and allocate the memory that the launch needs.

    Args:
        x: the activations.
        weight: see `KernelWeight`.
        config: serves m rows.
        m: most rows of a product.
        batches: products of the launch.
        usual_batches: number of products for which the cut is chosen (default: `batches`).
    """
    tiles = (weight.padded_rows * (usual_batches or batches), weight.superblocks, weight.processors)
    parts, ranges = config.split(m, weight.bits, weight.group_size, *tiles)
    partials = transposed = None
    if parts > 1:
        size = batches * parts * weight.padded_rows * config.max_rows
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    if weight.entries is not None and m > GATHER_ROWS and config.kernel != "simt" and not is_spread(x, weight, config):
        rows = config.outlier_rows(m, ranges)
        transposed = torch.empty(batches * weight.cols, rows, dtype=x.dtype, device=x.device)
    return Scratch(parts, ranges, partials, transposed)


def decode_matmul(x: torch.Tensor, weight: KernelWeight, config: DecodeConfig, y: torch.Tensor) -> None:
    """Write y [n, rows] for 1 <= n <= config.max_rows rows of x [n, cols], by one fused launch.

    For an invariant weight the launch is the launch for config.max_rows rows, whatever n is.
    """
    if x.stride(1) != 1 or x.stride(0) * x.shape[0] > MAX_OFFSET:
        x = x.contiguous()
    m = config.max_rows if weight.invariant else x.shape[0]
    scratch = allocate_scratch(x, weight, config, m)
    if config.kernel == "simt":
        launch_simt(padded_columns(x, weight), weight, y, config, scratch)
    elif is_spread(x, weight, config):
        launch_spread(x, weight, y, config, scratch, m)
    else:
        launch_ssqr(x, weight, y, config, scratch, m)


def ssqr_matmul(x: torch.Tensor, weight: KernelWeight, config: DecodeConfig | None = None) -> torch.Tensor:
    """Return x W^T. Few rows: fused, accumulated in float32, rounded once. Many: through dense chunks.

    Rows are few if FUSED_LAUNCHES launches of the widest fused kernel serve them: reading a packed weight twice moves
    fewer bytes than writing it densely and reading it again. An invariant weight takes fused launches of one
    configuration for any number of rows. Only one stream at a time may multiply by a weight: the weight holds the
    tickets of the programs.

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
    m = flat.shape[0]
    if m == 0:
        return x.new_empty(*x.shape[:-1], weight.rows)
    if weight.invariant and config is None:
        config = decode_config(INVARIANT_ROWS, weight.bits, weight.arch, weight.group_size)
    widest = config.max_rows if config else max_decode_rows(weight.bits)
    # Triton launches on the current device, which need not be the tensors'.
    with torch.cuda.device_of(flat):
        if m > FUSED_LAUNCHES * widest and not weight.invariant:
            y = prefill_matmul(flat, weight)
        else:
            y = torch.empty(m, weight.rows, dtype=x.dtype, device=x.device)
            for rows, out in zip(flat.split(widest), y.split(widest), strict=True):
                entry = config or decode_config(rows.shape[0], weight.bits, weight.arch, weight.group_size)
                decode_matmul(rows, weight, entry, out)
    return y.view(*x.shape[:-1], weight.rows)


def trellis_parts(weight: TrellisOperands, config: TrellisConfig = TRELLIS, batches: int = 1) -> int:
    """Return the parts of split-K that the model of the time chooses; it does not depend on the rows of x.

    Args:
        weight: see `TrellisOperands`.
        config: of the launch.
        batches: products of the launch.
    """
    tiles, programs = weight.row_tiles * batches, config.programs_per_processor
    return split_k(tiles, weight.column_units, weight.processors, programs, config.least_units, 1)[0]


def trellis_scratch(
    x: torch.Tensor, weight: TrellisOperands, columns: int, parts: int, batches: int = 1
) -> TrellisScratch:
    """Allocate the memory that one launch needs.

    Args:
        x: the activations.
        weight: see `TrellisOperands`.
        columns: of a product: twice the rows of x, or more.
        parts: of split-K.
        batches: products of the launch.
    """
    partials = None
    if parts > 1:
        size = batches * parts * weight.row_tiles * TILE_ROWS * columns // 2
        partials = torch.empty(size, dtype=torch.float32, device=x.device)
    units = batches * weight.column_units
    activations = torch.empty(units, 4, columns, 16, dtype=torch.int32, device=x.device)
    factors = torch.empty(units, columns, dtype=torch.float32, device=x.device)
    return TrellisScratch(parts, activations, factors, partials)


def trellis_matmul(x: torch.Tensor, weight: TrellisOperands, config: TrellisConfig = TRELLIS) -> torch.Tensor:
    """Return x W^T. Few rows: by integer tensor cores, accumulated in float32, rounded once. Many: by dense chunks.

    Each row of x is rounded to 2^-16 of the largest of each 128 of its products with column scales. As in `ssqr_matmul`
    an invariant weight takes launches of one size for any number of rows, and only one stream at a time may multiply by
    a weight.

    Args:
        x: [..., cols], bfloat16 or float16, on the weight's device.
        weight: from `prepare_trellis`.
        config: of the launches.

    Returns:
        [..., rows], dtype of x.

    Raises:
        KernelInputError: x does not fit the weight.
    """
    check_activations(x, weight)
    flat = x.reshape(-1, weight.cols)
    m = flat.shape[0]
    if m == 0:
        return x.new_empty(*x.shape[:-1], weight.rows)
    if flat.stride(1) != 1 or flat.stride(0) * m > MAX_OFFSET:
        flat = flat.contiguous()
    most = TRELLIS_REGIMES[-1]
    with torch.cuda.device_of(flat):
        if m > TRELLIS_LAUNCHES * most and not weight.invariant:
            y = prefill_trellis(flat, weight)
        else:
            y = torch.empty(m, weight.rows, dtype=x.dtype, device=x.device)
            for rows, out in zip(flat.split(most), y.split(most), strict=True):
                served = most if weight.invariant else next(n for n in TRELLIS_REGIMES if n >= rows.shape[0])
                scratch = trellis_scratch(rows, weight, 2 * served, trellis_parts(weight, config))
                launch_trellis(rows, weight, out, config.stages, scratch)
    return y.view(*x.shape[:-1], weight.rows)
