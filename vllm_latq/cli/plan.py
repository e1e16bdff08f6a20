"""The command `latq plan`: the bits with which a model fits a GPU, and how fast the GPU can then be."""

import argparse
import shlex
from typing import Any

from vllm_latq import console
from vllm_latq.errors import ConfigError
from vllm_latq.quantize.gpus import GIB
from vllm_latq.quantize.recipe import DEFAULT_METHOD, HUFFMAN_METHODS, METHODS, Recipe

EXAMPLES = """examples:
  latq plan Qwen/Qwen3-8B --memory 24GiB
  latq plan Qwen/Qwen3-8B --memory 24GiB --context 32768 --concurrency 4
  latq plan MODEL --memory 24GiB --checkpoint OUT"""
PARTS = {
    "left free": "vLLM leaves free (10%)",
    "runtime": "CUDA, libraries, graphs (assumed)",
    "activations": "activations of one step (estimated)",
    "KV cache": "KV cache",
    "unquantized weights": "embeddings, norms and the like, 16 bits",
}


def add_command(commands: Any) -> None:
    """Add `plan` to the subparsers of `latq`."""
    command = commands.add_parser(
        "plan",
        help="find the bits with which a model fits a GPU, from config.json alone",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    command.add_argument("model", metavar="MODEL", help="model directory or hub name; no weights are read or loaded")
    command.add_argument("--memory", required=True, help="memory of the GPU, such as 24GiB")
    add_load(command)
    methods = [method for method in METHODS if method not in HUFFMAN_METHODS]
    command.add_argument("--method", default=DEFAULT_METHOD, choices=methods, help=f"default {DEFAULT_METHOD}")
    command.add_argument(
        "--checkpoint", help="checkpoint of latq of the same model, to predict the KL divergence from its report"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def add_load(command: Any) -> None:
    """Add the options that say what is served at a time."""
    command.add_argument(
        "--context", type=int, help="tokens of each sequence (default 32768, or fewer if the model has fewer positions)"
    )
    command.add_argument("--concurrency", type=int, help="sequences of this length at a time (default 1)")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    planned = _plan(options)
    if options.json:
        console.print_json(planned)
        return 0
    _show(planned, options)
    return 0


def _plan(options: argparse.Namespace) -> dict[str, Any]:
    """Return the plan as JSON values."""
    from vllm_latq.quantize import fit

    recipe = Recipe.of(None, {"method": options.method})
    shapes = fit.model_shapes(options.model, recipe)
    given = fit.load(options.memory, options.context, options.concurrency, shapes)
    recipe = fit.fitting(recipe, shapes, given)
    size = fit.weight_bytes(shapes, recipe)
    planned: dict[str, Any] = {
        "model": str(options.model),
        "method": recipe.method,
        **given._asdict(),
        "spent": fit.spent(shapes, given),
        "weights": shapes.weights,
        "bits": recipe.bits,
        "weight_bytes": round(size),
        "bits_per_weight": 8 * size / shapes.weights,
        "speeds": fit.speeds(shapes, recipe, given),
    }
    if options.checkpoint is not None:
        planned["predicted_kl"] = _predicted(options.checkpoint, recipe)
    return planned


def _predicted(checkpoint: str, recipe: Recipe) -> float:
    """Return the KL divergence that the report of a checkpoint predicts at the bits of a recipe."""
    from vllm_latq.format.reader import REPORT_FILE, CheckpointReader
    from vllm_latq.format.report import finite_number
    from vllm_latq.quantize.fit import predicted_loss

    totals, where = CheckpointReader(checkpoint).report().get("totals"), f"{checkpoint}/{REPORT_FILE}: totals"
    found = totals if isinstance(totals, dict) else {}
    loss, had = (finite_number(found.get(name), f"{where}.{name}") for name in ("loss", "bits_per_weight"))
    loss = predicted_loss(loss, had, recipe.bits)
    if loss is None or recipe.method != DEFAULT_METHOD:
        expected = "a checkpoint of latq, whose report has the loss, and --method latq"
        raise ConfigError("checkpoint", expected, "no loss" if loss is None else f"--method {recipe.method}")
    return loss


def _show(planned: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the budget, the command, and the speeds."""
    context, concurrency = planned["context"], planned["concurrency"]
    rows: list[tuple[str, ...]] = [("GPU", f"{planned['memory'] / GIB:.2f}")]
    for name, size in planned["spent"].items():
        count = f", {concurrency} x {context:,} tokens" if name == "KV cache" else ""
        rows.append((f"- {PARTS[name]}{count}", f"{size / GIB:.2f}"))
    weights = f"= {planned['weights']:,} quantized weights at {planned['bits_per_weight']:.2f} bits"
    rows.append((weights, f"{planned['weight_bytes'] / GIB:.2f}"))
    unused = planned["memory"] - sum(planned["spent"].values()) - planned["weight_bytes"]
    if unused > 0.01 * planned["memory"]:
        rows.append(("  room for more tokens or sequences", f"{unused / GIB:.2f}"))
    console.print_table(f"{planned['model']} in {options.memory}", ("", "GiB"), rows)
    if "predicted_kl" in planned:
        print(f"predicted KL divergence: about {console.number(planned['predicted_kl'], 2)} nats per token")
    command = ["latq", "quantize", str(options.model), "OUT", "--fit", options.memory]
    given = {"--method": options.method if options.method != DEFAULT_METHOD else None}
    given |= {"--context": options.context, "--concurrency": options.concurrency}
    print(shlex.join(command + [str(word) for pair in given.items() if pair[1] is not None for word in pair]))
    rows = [
        (gpu["name"], f"{gpu['gib']}", f"{gpu['bandwidth']:,}", f"{gpu['short']:.0f}", f"{gpu['long']:.0f}")
        for gpu in planned["speeds"]
    ]
    if rows:
        columns = ("GPU with as much memory", "GB", "GB/s", "tokens/s, first", f"tokens/s, after {context:,}")
        console.print_table("one sequence: upper bound by memory bandwidth", columns, rows)
