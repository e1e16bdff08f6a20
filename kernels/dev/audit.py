"""Machine-code audit of the kernels, on a machine with no GPU: `python -m vllm_latq.kernels.dev.audit [--json]`.

Every kernel is compiled ahead of time for each architecture and its main loop is read back: instructions per weight and
thread, the cycles of the busiest pipe, registers, spills, shared memory, and how many warps a multiprocessor holds. The
counts are static: they say what the GPU has to issue, not how long it takes.
"""

import argparse
import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_latq.kernels.bench.compile_pool import available_processes
from vllm_latq.kernels.bench.processor import MULTIPROCESSORS
from vllm_latq.kernels.configs import (
    COMPILER,
    REGIMES,
    SIMT,
    TRELLIS,
    DecodeConfig,
    decode_config,
    max_decode_rows,
)
from vllm_latq.kernels.decode.launch import Variant
from vllm_latq.kernels.decode.prefill import SLOTS, dequantize_tiles
from vllm_latq.kernels.decode.simt import simt_constants, ssqr_simt, warps_of
from vllm_latq.kernels.decode.ssqr import ssqr_constants, ssqr_tensor_core
from vllm_latq.kernels.decode.trellis import (
    SMALLEST,
    STEPS_OF_X,
    WARPS,
    trellis_activations,
    trellis_constants,
    trellis_tensor_core,
)
from vllm_latq.kernels.decode.trellis_prefill import KEPT_AT_ONCE, dequantize_trellis
from vllm_latq.kernels.dev.sass import MachineCode, disassemble
from vllm_latq.kernels.entropy.chunks import LANES
from vllm_latq.kernels.entropy.huffman import HuffmanCode, huffman_chunks, huffman_constants
from vllm_latq.kernels.errors import require
from vllm_latq.kernels.experts.grouped import ssqr_grouped
from vllm_latq.kernels.experts.grouped_trellis import trellis_grouped, trellis_grouped_activations
from vllm_latq.kernels.layout.trellis import TILE_ROWS, UNIT_COLUMNS

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
DEPENDENT_ARCHITECTURES = ARCHITECTURES[3:]
WAIT = "ACQBULK"  # machine code of `griddepcontrol.wait`
BITS = (2, 3, 4, 8)
# The constants of the format (FORMAT.md section 3.3), which `serving` passes; a test holds them equal.
HUFFMAN = HuffmanCode(max_length=15, max_symbols=4096, escape_bits=32)
_POINTERS = {
    "word_ptr": "*i32", "scale_ptr": "*i32", "flat_scale_ptr": "*fp32", "row_scale_ptr": "*fp32", "order_ptr": "*i32",
    "stream_ptr": "*i32", "table_ptr": "*i32", "start_ptr": "*i64", "used_ptr": "*i32", "z_ptr": "*i32",
    "entry_ptr": "*i32", "slice_ptr": "*i32", "list_ptr": "*i32", "partial_ptr": "*fp32", "ticket_ptr": "*i32",
    "parts_ptr": "*i8", "factor_ptr": "*fp32", "unit_ptr": "*i16", "run_ptr": "*i16", "tile_ptr": "*i32",
    "tile_scale_ptr": "*fp32", "exponent_ptr": "*i8", "column_ptr": "*i16", "column_exponent_ptr": "*i8",
    "place_ptr": "*i32", "stored_ptr": "*i64", "value_ptr": "*bf16", "part_word_ptr": "*i32",
    "xt_as_int64_ptr": "*i64", "expert_ptr": "*i32", "begin_ptr": "*i32", "live_ptr": "*i32",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        bits: 0 for any width.
        max_rows: 0 for any number of rows.
        sass_per_weight: instructions of the main loop, per weight and thread.
        cycles_per_weight: cycles of a scheduler that these take at least, per weight and thread: to issue them, or of
            the busiest pipe.
        warps: that a multiprocessor holds at once, by registers and shared memory.
    """

    kernel: str
    arch: str
    bits: int
    max_rows: int
    sass_per_weight: float
    cycles_per_weight: float
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Audit:
    """A row of the table, with the opcodes of the main loop and the whole kernel's code.

    Tests check them against limits.
    """

    row: Row
    loop: Counter[str]
    code: MachineCode


def compile_kernel(
    kernel: Any, target: GPUTarget, values: dict[str, Any], num_warps: int, activations: str = "*bf16"
) -> Any:
    """Compile `kernel` for `target`, with compile-time `values` and typed activations."""
    require(isinstance(kernel, triton.JITFunction), "audit", "Triton's compiler", "its interpreter",
            "Unset TRITON_INTERPRET.")  # fmt: skip
    general = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    values = {parameter.name: parameter.default for parameter in kernel.params if parameter.has_default} | values
    dynamic = [name for name in kernel.arg_names if name not in values]
    types = {name: _POINTERS.get(name, activations) if name.endswith("_ptr") else "i32" for name in dynamic}
    # As the launch would: the arguments that Triton specializes are divisible by 16 in a real model.
    return compile_ahead(kernel, target, types, values, set(dynamic) - general, num_warps)


def compile_ahead(
    kernel: Any, target: GPUTarget, types: dict[str, str], values: dict[str, Any], aligned: set[str], num_warps: int
) -> Any:
    """Compile `kernel`: arguments have `types`, those in `aligned` are divisible by 16, the others are `values`."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    hints = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(signature) if name in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=hints)
    return triton.compile(source, target=target, options={"num_warps": num_warps, **COMPILER})


def _audit(
    kernel: Any, arch: str, bits: int, rows: int, weights: int, values: dict[str, Any], num_warps: int,
    activations: str = "*bf16",
) -> Audit:  # fmt: skip
    """Compile one kernel and read it back; `weights`: those that a program handles per trip of its main loop."""
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    compiled = compile_kernel(kernel, target, values, num_warps, activations)
    code, shared = disassemble(compiled.asm["cubin"]), compiled.metadata.shared
    loop, processor, share = code.main_loop(), MULTIPROCESSORS[arch], 32 * num_warps / weights
    counts = round(loop.total() * share, 3), round(processor.cycles(loop) * share, 3)
    warps = num_warps * processor.resident_programs(num_warps, code.registers, shared)
    row = Row(kernel.__name__, arch, bits, rows, *counts, warps, code.registers, code.spill_bytes(), shared)
    return Audit(row, loop, code)


def audit_tensor_core(
    arch: str, config: DecodeConfig, variant: Variant, activations: str = "*bf16", grouped: bool = False
) -> Audit:
    """Audit one configuration and variant of the tensor-core kernel; `grouped`: the kernel of routed experts."""
    kernel, values = ssqr_grouped if grouped else ssqr_tensor_core, ssqr_constants(config, variant)
    label = (arch, variant.bits, config.max_rows)
    return _audit(kernel, *label, config.block_n * 256, values, config.num_warps, activations)


def audit_dependent(arch: str, config: DecodeConfig, variant: Variant) -> Audit:
    """Audit the tensor-core kernel as a dependent launch, which sm_90 and later have."""
    values = ssqr_constants(config, variant) | {"DEPENDENT": True}
    label = (arch, variant.bits, config.max_rows)
    return _audit(ssqr_tensor_core, *label, config.block_n * 256, values, config.num_warps)


def audit_trellis(arch: str, rates: tuple[int, ...], rows: int, grouped: bool = False) -> Audit:
    """Audit the kernel of trellis codes for some rates, in split-K; its main loop is that of the costliest rate.

    `grouped`: the kernel of routed experts.
    """
    mask = sum(1 << rate for rate in rates)
    values = trellis_constants(2 * rows, TRELLIS.stages, True, mask, asm=True, upcast=False)
    bits = rates[0] // 2 if len(rates) == 1 else 0
    kernel = trellis_grouped if grouped else trellis_tensor_core
    return _audit(kernel, arch, bits, rows, TILE_ROWS * UNIT_COLUMNS, values, WARPS)


def audit_trellis_others(arch: str) -> Iterator[Audit]:
    """Audit the kernels around the products of trellis codes: of activations, and of prefill."""
    values = {"COLUMNS": 16, "STEPS": STEPS_OF_X, "SMALLEST": SMALLEST}
    yield _audit(trellis_activations, arch, 0, 0, UNIT_COLUMNS, values, 1)
    yield _audit(trellis_grouped_activations, arch, 0, 0, UNIT_COLUMNS, values, 1)
    yield _audit(dequantize_trellis, arch, 0, 0, TILE_ROWS * UNIT_COLUMNS, {"ASM": True, "AT_ONCE": KEPT_AT_ONCE}, 4)


def audit_simt(arch: str, variant: Variant, config: DecodeConfig = SIMT) -> Audit:
    """Audit one variant of the SIMT kernel."""
    label, warps = (arch, variant.bits, variant.m), warps_of(config, variant.bits, variant.m)
    return _audit(ssqr_simt, *label, config.block_n * 256, simt_constants(config, variant), warps)


def audit_dequantize(arch: str, bits: int) -> Audit:
    """Audit the kernel that writes packed tiles as dense bf16, group size 128, without outliers."""
    return _audit(dequantize_tiles, arch, bits, 0, 64 * 256, _dequantize_constants(bits, False), 4)


def audit_dequantized_outliers(arch: str) -> Audit:
    """Audit the loop in which the same kernel adds outliers; the rest of it is that for 3 bits."""
    return _audit(dequantize_tiles, arch, 0, 0, 64 * SLOTS, _dequantize_constants(3, True), 4)


def _dequantize_constants(bits: int, outliers: bool) -> dict[str, Any]:
    """Return the compile-time arguments of `dequantize_tiles`, by name."""
    scales = {"MIDRISE": False, "HAS_FLAT_SCALES": False, "HAS_ROW_SCALES": False}
    return {"BITS": bits, "GROUP": 128, **scales, "HAS_OUTLIERS": outliers, "SLOTS": SLOTS}


def audit_decoding(arch: str) -> Audit:
    """Audit the decoder of Huffman streams, which runs at load."""
    return _audit(huffman_chunks, arch, 0, 0, LANES, huffman_constants(HUFFMAN), 1)


def audits(
    architectures: tuple[str, ...] = ARCHITECTURES, bits: tuple[int, ...] = BITS
) -> Iterator[Callable[[], Audit]]:
    """Yield, for each kernel of the table, the function that audits it."""
    for arch in architectures:
        for width in bits:
            for rows in REGIMES:
                if rows <= max_decode_rows(width):
                    yield partial(audit_tensor_core, arch, decode_config(rows, width, arch), Variant(width, rows))
            yield partial(audit_simt, arch, Variant(width, 1))
            yield partial(audit_dequantize, arch, width)
        yield partial(audit_dequantized_outliers, arch)
        yield partial(audit_decoding, arch)


def _row(audit: Callable[[], Audit]) -> Row:
    return audit().row


# Title of a table -> its cell for a row.
QUANTITIES: dict[str, Callable[[Row], str]] = {
    "instructions of the main loop per weight and thread": lambda row: f"{row.sass_per_weight:.2f}",
    "cycles of a scheduler that these take at least, per weight and thread": lambda row: f"{row.cycles_per_weight:.2f}",
    "warps that a multiprocessor holds": lambda row: f"{row.warps}",
    "registers per thread": lambda row: f"{row.registers}",
    "KB of shared memory": lambda row: f"{row.shared_bytes / 1024:.0f}",
    "bytes spilled": lambda row: f"{row.spill_bytes}",
}


def print_table(rows: Iterable[Row], quantity: Callable[[Row], str]) -> None:
    """Print a Markdown table of a quantity, with a row per kernel and a column per GPU."""
    cells: dict[tuple[str, int, int], dict[str, str]] = {}
    for row in rows:
        cells.setdefault((row.kernel, row.bits, row.max_rows), {})[row.arch] = quantity(row)
    architectures = list(dict.fromkeys(arch for found in cells.values() for arch in found))
    print(f"| kernel | bits | rows | {' | '.join(architectures)} |")
    print("|---|---|---|" + "---|" * len(architectures))
    for (kernel, bits, rows_served), found in cells.items():
        width, rows_text = bits or "any", rows_served or "any"
        print(f"| {kernel} | {width} | {rows_text} | {' | '.join(found[arch] for arch in architectures)} |")


def print_waits(architectures: Iterable[str], bits: Iterable[int]) -> None:
    """Print which accesses of memory a dependent launch makes before it waits for the kernel before it."""
    print("| bits | rows | GPU | prefetches of words before the wait | other accesses before it | after it |")
    print("|---|---|---|---|---|---|")
    for arch in architectures:
        for width in bits:
            for rows in (1, 8):
                code = audit_dependent(arch, decode_config(rows, width, arch), Variant(width, rows)).code
                before, every = code.memory_before(WAIT), code.memory_before("none")
                early = sum(n for name, n in before.items() if ".PF2" in name)
                others, after = before.total() - early, every.total() - before.total()
                print(f"| {width} | {rows} | {arch} | {early} | {others} | {after} |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m vllm_latq.kernels.dev.audit", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a list of objects instead of tables")
    parser.add_argument("--waits", action="store_true", help="print where dependent launches of sm_90 and later wait")
    parser.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--bits", nargs="+", type=int, choices=BITS, default=BITS)
    options = parser.parse_args(arguments)
    if options.waits:
        print_waits([arch for arch in options.arch if arch in DEPENDENT_ARCHITECTURES], options.bits)
        return
    with ProcessPoolExecutor(available_processes(), multiprocessing.get_context("spawn")) as workers:
        rows = list(workers.map(_row, audits(tuple(options.arch), tuple(options.bits))))
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print(f"Triton {triton.__version__}, torch {torch.__version__}; group size 128, outliers, split-K, bf16.")
        for title, quantity in QUANTITIES.items():
            print(f"\n{title}:\n")
            print_table(rows, quantity)


if __name__ == "__main__":
    main()
