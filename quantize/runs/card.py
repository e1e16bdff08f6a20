"""The model card (README.md) of a checkpoint.

Invariant: between ACCURACY and END the card shows the results of `latq eval`; `update_card` changes nothing else.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_latq.console import bits, number
from vllm_latq.errors import printable
from vllm_latq.format.evaluation import EvaluationRun, evaluation_runs
from vllm_latq.format.files import read_json
from vllm_latq.quantize.machine.durable_files import rename_durably
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.runs.commands import commands

CARD_FILE = "README.md"
ACCURACY, END = "<!-- accuracy: written by latq eval -->", "<!-- end of accuracy -->"
# Keys of the base model's card that hold for the checkpoint, too.
_TAKEN_OVER = ("license", "license_name", "license_link", "pipeline_tag")
# End of the name of an architecture -> the task of its models on the Hugging Face hub.
_TASKS = {
    "ForCausalLM": "text-generation",
    "ForConditionalGeneration": "image-text-to-text",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "Model": "feature-extraction",
}
_PLAIN = re.compile(r"[A-Za-z][\w.-]*(/[\w.-]+)*")


def base_model(source: Path) -> dict[str, Any]:
    """Return the name of an original model and the bytes of its weights.

    The name is the one on the hub for a snapshot in the Hugging Face cache, models--org--name/snapshots/COMMIT, and
    otherwise the name of the directory.
    """
    resolved = source.resolve()
    repository = resolved.parent.parent.name.removeprefix("models--").replace("--", "/")
    name = repository if resolved.parent.name == "snapshots" else resolved.name
    return {"name": name, "bytes": sum(path.stat().st_size for path in source.glob("*.safetensors"))}


def model_card(source: Path, recipe: Recipe, report: Mapping[str, Any], output: str) -> str:
    """Return the card as Markdown with Hugging Face front matter: what the checkpoint is, how to use and to make it.

    Args:
        source: directory of the original model.
        recipe: of the run.
        report: of the run.
        output: name of the checkpoint's directory.
    """
    name, totals, taken = report["model"]["name"], report["totals"], _taken_over(source)
    front = {"base_model": name, "base_model_relation": "quantized", "library_name": "vllm", **taken}
    lines = "\n".join(f"{key}: {_scalar(value)}" for key, value in front.items())
    run = commands(recipe, name, output, report["calibration"])
    options = "\n".join(f"- {key}: `{value}`" for key, value in recipe.to_dict().items())
    facts = "\n".join(f"| {key} | {value} |" for key, value in _facts(totals, report, taken).items())
    return f"""---
{lines}
tags:
- latq
- quantized
---
# {output}
{_code(name)}, quantized to {totals["bits_per_weight"]:.2f} bits per weight by the method `{recipe.method}` of
vllm-latq.

| | |
|---|---|
| base model | {_code(name)} |
{facts}

## Accuracy
{ACCURACY}
{_accuracy([], run["Measure"])}
{END}
`latq_report.json` has the error of every layer, and its bound where one is claimed. `latq report {output}` shows them.

## Serve
With vllm and vllm-latq installed, in the folder that holds `{output}`:

```bash
{run["Serve"]}
```

```bash
curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"model": {json.dumps(output)}, "prompt": "The capital of France is", "max_tokens": 16}}'
```

## Load with transformers
**`import vllm_latq` must come before `from_pretrained`.** Without it transformers cannot read the format, and
refuses the checkpoint.

```python
import vllm_latq
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({json.dumps(output)})
```

## Check
```bash
{run["Verify"]}
```

## Make it again
```bash
{run["Quantize"]}
```

The recipe in full:

{options}
"""


def front_matter(checkpoint: Path, tags: Iterable[str]) -> str:
    """Return the front matter of a checkpoint's card with other tags; nothing if there is no such card."""
    path = checkpoint / CARD_FILE
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    front = re.match(r"(---\n.*?\n)tags:\n(?:- .*\n)*---\n", text, flags=re.DOTALL)
    listed = "".join(f"- {tag}\n" for tag in tags)
    return f"{front[1]}tags:\n{listed}---\n" if front else ""


def update_card(checkpoint: str | Path) -> bool:
    """Write the kept results of `latq eval` into a checkpoint's card.

    The fingerprint does not cover the card.

    Returns:
        Whether there was a card with a place for them.

    Raises:
        CheckpointError: the kept results are damaged.
        OSError: the card cannot be read or written.
    """
    path = Path(checkpoint) / CARD_FILE
    if path.is_symlink() or not path.is_file():
        return False
    before, found, rest = path.read_text(encoding="utf-8").partition(f"{ACCURACY}\n")
    _, ended, after = rest.partition(f"\n{END}")
    if not found or not ended:
        return False
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # nothing is written through a link
    results = _accuracy(evaluation_runs(checkpoint), "latq eval")
    temporary.write_text(f"{before}{found}{results}{ended}{after}", encoding="utf-8")
    rename_durably(temporary, path)
    return True


def _facts(totals: Mapping[str, Any], report: Mapping[str, Any], taken: Mapping[str, str]) -> dict[str, str]:
    """Return the rows of the card's first table, except the base model."""
    licence = taken.get("license_name") or taken.get("license")
    stored, served = totals["bits_per_weight"], totals["served_bits_per_weight"]
    facts = {
        "licence": f"the base model's: {_code(licence)}" if licence else "the base model's; its card names none",
        "quantized weights": f"{totals['weights']:,}, in {totals['bytes']:,} bytes",
        "bits per quantized weight": f"{bits(stored)} stored, {bits(served)} in GPU memory; everything counted",
    }
    if totals.get("loss") is not None:
        bound = "" if totals["loss_bound"] is None else f", at most {number(totals['loss_bound'], 2)}"
        note = "on the calibration text, to second order; with little text too low"
        facts["predicted KL divergence"] = f"{number(totals['loss'], 2)} nats per token{bound} ({note})"
    facts["calibration"] = _calibration(report["calibration"])
    facts["made"] = f"{report['date']}, with vllm-latq {report['vllm_latq']}, torch {report['torch']}"
    return facts


def _calibration(text: Mapping[str, Any] | None) -> str:
    """Return the calibration text in words."""
    if text is None:
        return "none"
    name = f"{_code(text['name'])}, " if text.get("name") else ""
    digest = f", SHA-256 `{text['sha256']}`" if text.get("sha256") else ""
    return f"{name}{text['samples']} windows of {text['seq_len']} tokens{digest}"


def _accuracy(runs: Iterable[EvaluationRun], command: str) -> str:
    """Return a table of evaluations, and of their tasks; without any, a sentence with the command that measures."""
    rows, tasks = [], []
    for run in runs:
        if run.windows is not None:
            share = "-" if run.top1_agreement is None else f"{100 * run.top1_agreement:.1f}%"
            measured = (run.perplexity, run.baseline_perplexity, run.kl, run.kl_p99, run.kl_max)
            numbers = (number(value) for value in measured)
            rows.append(
                " | ".join(["", _code(run.described), f"{run.windows:g} x {run.seq_len:g}", *numbers, share, ""])
            )
        for task, metrics in (run.tasks or {}).items():
            tasks += [f" | {_code(task)} | {_code(name)} | {number(value)} |" for name, value in metrics.items()]
    kl = "KL divergence, nats per token | 99th percentile | largest"
    head = f" | text | windows | perplexity | of the base model | {kl} | top-1 agreement | "
    tables = [
        "\n".join(line.strip() for line in (title, re.sub(r"[^|]+", "---", title.strip()), *found))
        for title, found in ((head, rows), (" | task | metric | value |", tasks))
        if found
    ]
    if not tables:
        return f"Not measured yet. This measures it and writes the result here:\n\n```bash\n{command}\n```"
    return "\n\n".join(tables)


def _taken_over(source: Path) -> dict[str, str]:
    """Return licence and task of the base model: from its card, or the task from its architecture."""
    path = source / CARD_FILE
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    front = re.match(r"---\r?\n(.*?)\r?\n---\s", text, flags=re.DOTALL)
    pairs = re.findall(r"^(\w+):[ \t]*(\S.*?)\s*$", front[1], flags=re.MULTILINE) if front else []
    found = {key: value.strip("'\"") for key, value in pairs if key in _TAKEN_OVER}
    if "pipeline_tag" not in found:
        architecture = str((read_json(source / "config.json").get("architectures") or [""])[0])
        task = next((task for end, task in _TASKS.items() if architecture.endswith(end)), None)
        found |= {"pipeline_tag": task} if task else {}
    return found


def _scalar(value: str) -> str:
    """Return a text as YAML: quoted where it is more than a name."""
    return value if _PLAIN.fullmatch(value) else json.dumps(value)


def _code(text: str) -> str:
    """Return a text as code in a table of Markdown."""
    return f"`{printable(text).replace('`', '').replace('|', '')}`"
