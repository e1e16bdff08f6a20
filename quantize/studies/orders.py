"""Rounding orders compared by the trace of D: `python -m vllm_latq.quantize.studies.orders MODEL --calibration FILE`.

At one scale per matrix the error bound is proportional to it. Table 2 of the ICLR 2026 version of "GPTQ as Babai", with
lattice reduction as a further column.
"""

import argparse
import json
import math
from collections.abc import Iterable, Sequence

import torch

from vllm_latq.console import print_table
from vllm_latq.errors import LatqError, naming
from vllm_latq.quantize.calibration.stream import model_hessians
from vllm_latq.quantize.calibration.windows import calibration_samples
from vllm_latq.quantize.lattice.choices import ORDERS
from vllm_latq.quantize.lattice.factor import factorize, inverse_factor
from vllm_latq.quantize.lattice.reduction import reduce_lattice
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import model_directory, torch_device
from vllm_latq.quantize.recipe import Recipe


def trace_table(
    hessians: Iterable[tuple[str, torch.Tensor]], damping: float = 0.01, random_orders: int = 20, lll: bool = True
) -> list[dict[str, float | str]]:
    """One row per Hessian: its name and the trace of D by order.

    Args:
        hessians: name and X^T X [c, c].
        damping: relative, the same for all orders.
        random_orders: how many permutations the column `random` is the mean of.
        lll: whether to add the column `lll`: the reduced basis, or act-order where that is no better.

    Returns:
        Rows with `name`, each of ORDERS, `reversed` (the natural order back to front), `random`, and `lll`.

    Raises:
        NumericalError: as `factorize`.
    """
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, float | str]] = []
    for name, hessian in hessians:
        row: dict[str, float | str] = {"name": name}
        with naming(name):
            factors = {order: factorize(hessian, order, damping) for order in ORDERS}
        row |= {order: float(factor.diagonal.sum()) for order, factor in factors.items()}
        damped = factors["natural"].hessian
        size = len(damped)
        row["reversed"] = _trace(damped.flip(0, 1))
        drawn = [torch.randperm(size, generator=generator).to(damped.device) for _ in range(random_orders)]
        if drawn:
            row["random"] = sum(_trace(damped[order][:, order]) for order in drawn) / len(drawn)
        if lll:
            reduced = reduce_lattice(factors["act"])
            row["lll"] = row["act"] if reduced is None else float(reduced.factor.diagonal.sum())
        rows.append(row)
    return rows


def _trace(permuted: torch.Tensor) -> float:
    upper = inverse_factor(permuted, 0.0)
    return float("nan") if upper is None else float(upper.diagonal().pow(-2).sum())


def by_kind(rows: Sequence[dict[str, float | str]]) -> dict[str, dict[str, float]]:
    """Leaf names of an input's linears ("q_proj, k_proj, v_proj") -> order -> trace, relative to act's.

    Args:
        rows: of `trace_table`, named by the linears of their inputs, comma-separated; ratios are geometric means over
            the inputs of a kind.
    """
    logs: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        kind = ", ".join(name.rpartition(".")[2] for name in str(row["name"]).split(", "))
        traces = {order: float(trace) for order, trace in row.items() if order != "name"}
        logs.setdefault(kind, []).append({order: math.log(trace / traces["act"]) for order, trace in traces.items()})
    return {
        kind: {order: math.exp(sum(one[order] for one in ratios) / len(ratios)) for order in ratios[0]}
        for kind, ratios in logs.items()
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of a model, by kind of input; with --json the traces of every input."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_latq.quantize.studies.orders",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="model directory or hub name")
    parser.add_argument("--calibration", required=True, help="text file or dataset, as for `latq quantize`")
    parser.add_argument("--num-samples", type=int, default=256)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--damping", type=float, default=Recipe.damping, help="relative (default %(default)g)")
    parser.add_argument("--random", type=int, default=20, help="permutations that `random` is the mean of")
    parser.add_argument("--lll", action="store_true", help="add the trace on the LLL-reduced basis")
    parser.add_argument("--device", help="torch device (default: cuda where there is one)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    decoder = Decoder(model_directory(options.model), torch_device(options.device))
    recipe = Recipe("gptq", num_samples=options.num_samples, seq_len=options.seq_len)
    samples = calibration_samples(decoder, recipe, options.calibration).tokens
    named = ((", ".join(hessian.shared.names), hessian.matrix) for hessian in model_hessians(decoder, samples))
    rows = trace_table(named, options.damping, options.random, options.lll)
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    kinds = by_kind(rows)
    columns = list(next(iter(kinds.values())))
    cells = [(kind, *(f"{ratios[order]:.3f}" for order in columns)) for kind, ratios in kinds.items()]
    print_table("trace of D relative to act-order, geometric means", ("inputs of", *columns), cells)


if __name__ == "__main__":
    try:
        main()
    except LatqError as error:
        raise SystemExit(f"orders: {error}") from None
