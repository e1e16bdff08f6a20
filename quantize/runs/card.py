"""The model card (README.md) of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_latq.console import bits
from vllm_latq.quantize.recipe import Recipe


def model_card(source: Path, recipe: Recipe, report: Mapping[str, Any]) -> str:
    """Markdown text with Hugging Face front matter: what this is, how it was made, how to serve it."""
    totals = report["totals"]
    source = source.resolve()
    # In a Hugging Face cache a model is models--org--name/snapshots/COMMIT.
    repository = source.parent.parent.name.removeprefix("models--").replace("--", "/")
    name = repository if source.parent.name == "snapshots" else source.name
    options = "\n".join(f"- {key}: `{value}`" for key, value in recipe.to_dict().items())
    return f"""---
base_model: {name}
library_name: vllm
tags:
- latq
- quantized
---
# {name}, quantized with {recipe.method}

{totals["weights"]:,} weights at {totals["bits_per_weight"]:.3f} bits each, everything stored counted
({totals["bytes"]:,} bytes); in memory, while served, {bits(totals["served_bits_per_weight"])}. Per-layer errors and
bounds are in `latq_report.json`.

Serve it: with vllm and vllm-latq installed, `vllm serve PATH --quantization latq`.

Check it: `latq verify PATH`. Look at it: `latq inspect PATH`.

## Recipe
{options}
"""
