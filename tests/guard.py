"""Record what a refactoring must not change, on one commit, and compare two records.

    python tests/guard.py record before.json      # on the commit before
    python tests/guard.py record after.json       # on the commit after
    python tests/guard.py compare before.json after.json

A record holds, for a checkpoint of every method on the bundled model, the sha256 of each weight file and the index and
the whole config.json; the sha256 of the PTX of every kernel that the audit compiles, per architecture, less names,
comments and line information; and the tokens that the real vLLM engine chooses greedily on some of these checkpoints.
The report is left out: it holds times. Takes about 15 minutes on two cores; `--parts` and `--arch` record less.
"""

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
PARTS = ("checkpoints", "tokens", "ptx")
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
PROMPTS = ("The following example shows how to", "import os\n", ".. versionadded::")
NEW_TOKENS = 24
# Every method, and every option that has code of its own.
RECIPES: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn", "bits": 4},
    "rtn-signed": {"method": "rtn", "bits": 3, "scales": "signed", "group_size": 64},
    "gptq": {"method": "gptq", "bits": 3},
    "gptq-beam": {"method": "gptq", "bits": 2, "beam": 3, "order": "min-pivot", "grid": "midrise"},
    "gptq-fitted": {"method": "gptq", "bits": 3, "scales": "fitted", "sweeps": 2, "target": "residual"},
    "gptq-stochastic": {"method": "gptq", "bits": 3, "rounding": "stochastic"},
    "ssqr": {"method": "ssqr", "bits": 3, "outlier_rate": 0.01},
    "ssqr-midrise": {"method": "ssqr", "bits": 2, "group_size": 32, "grid": "midrise", "beam": 2, "sweeps": 1},
    "ssqr-overflow": {"method": "ssqr", "bits": 3, "outliers": "overflow", "target": "original", "group_size": -1},
    "hptq": {"method": "hptq", "bits": 3.125},
    "hptq-beam": {"method": "hptq", "bits": 2.5, "beam": 2},
    "hptq-lll": {"method": "hptq", "bits": 2.5, "reduction": "lll"},
    "hrtn": {"method": "hrtn", "bits": 3.125},
    "latq": {"method": "latq", "bits": 3.6},
    "latq-group": {"method": "latq", "bits": 3.2, "grid": "group", "group_size": 64},
    "latq-head": {"method": "latq", "bits": 3.5, "ignore": [], "target": "residual"},
}
SERVED = ("gptq", "ssqr", "ssqr-midrise", "hptq", "latq", "latq-head")


def digest(data: bytes) -> str:
    """Return the sha256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def record_checkpoints(folder: Path) -> dict[str, dict[str, Any]]:
    """Quantize the bundled model by every recipe; return file name -> sha256, or the content of config.json."""
    from vllm_latq.quantize.pipeline import quantize_checkpoint
    from vllm_latq.quantize.recipe import Recipe

    found = {}
    for name, options in RECIPES.items():
        print(f"quantizing: {name}", file=sys.stderr, flush=True)
        recipe = Recipe(**{"num_samples": 16, "seq_len": 128, "ignore": ("lm_head",), **options})
        quantize_checkpoint(recipe, DATA / "pydoc-mini", folder / name, calibration=str(DATA / "calibration.txt"))
        files = sorted([*(folder / name).glob("*.safetensors"), *(folder / name).glob("*.index.json")])
        found[name] = {file.name: digest(file.read_bytes()) for file in files}
        found[name]["config.json"] = json.loads((folder / name / "config.json").read_text())
    return found


def record_tokens(folder: Path) -> dict[str, list[list[int]]]:
    """Return the greedy tokens of the engine after each prompt, for each of the `SERVED` checkpoints."""
    found = {}
    for name in SERVED:
        print(f"serving: {name}", file=sys.stderr, flush=True)
        command = [sys.executable, __file__, "tokens", str(folder / name)]
        quiet = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(command, env=quiet, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_tokens(checkpoint: str) -> None:
    """Print the greedy tokens of one checkpoint as a line of JSON."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        checkpoint, quantization="latq", max_model_len=128, max_num_seqs=4, enforce_eager=True,
        kv_cache_memory_bytes=1 << 25, disable_log_stats=True,
    )  # fmt: skip
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=NEW_TOKENS, temperature=0), use_tqdm=False)
    print(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


def _audit_module() -> Any:
    """Import the audit from whichever folder of kernels/ holds it."""
    (path,) = (ROOT / "kernels").rglob("audit.py")
    return importlib.import_module(".".join(["vllm_latq", *path.relative_to(ROOT).with_suffix("").parts]))


def plain_ptx(text: str) -> str:
    """Return PTX without comments, line information, debug sections and names of kernels."""
    text = re.sub(r"//.*", "", text)
    text = re.sub(r"^\s*\.(loc|file)\b.*$", "", text, flags=re.MULTILINE)
    text = re.split(r"^\s*\.section", text, maxsplit=1, flags=re.MULTILINE)[0]
    for name in re.findall(r"\.entry\s+(\w+)", text):
        text = re.sub(rf"\b{name}", "kernel", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def compiled_kernels(arch: str, part: int, parts: int) -> list[list[str]]:
    """Return [label, sha256 of the PTX] of every `parts`-th kernel that the audit compiles for `arch`."""
    audit, found = _audit_module(), []
    compile_ahead: Callable[..., Any] = audit.compile_ahead

    def recorded(kernel: Any, *arguments: Any, **options: Any) -> Any:
        compiled = compile_ahead(kernel, *arguments, **options)
        found.append([kernel.__name__, digest(plain_ptx(compiled.asm["ptx"]).encode())])
        return compiled

    audit.compile_ahead = recorded
    for position, task in enumerate(audit.audits((arch,))):
        if position % parts == part:
            task()
    return found


def record_ptx(architectures: tuple[str, ...]) -> dict[str, list[list[str]]]:
    """Return architecture -> [kernel, sha256 of its PTX] of everything that the audit compiles."""
    parts = 2
    tasks = [(arch, part, parts) for arch in architectures for part in range(parts)]
    found: dict[str, list[list[str]]] = {arch: [] for arch in architectures}
    with ProcessPoolExecutor(parts, multiprocessing.get_context("spawn")) as workers:
        for (arch, *_), kernels in zip(tasks, workers.map(compiled_kernels, *zip(*tasks, strict=True)), strict=True):
            print(f"compiled: {len(kernels)} kernels for {arch}", file=sys.stderr, flush=True)
            found[arch] += kernels
    return found


def without_deleted(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe of a checkpoint written before, without options that no longer exist after."""
    quantization = before["quantization_config"]
    kept = {key: value for key, value in quantization["recipe"].items()
            if key in after["quantization_config"]["recipe"]}  # fmt: skip
    return before | {"quantization_config": quantization | {"recipe": kept}}


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """Yield a line for everything that differs in the parts that both records have."""
    for name, files in before.get("checkpoints", {}).items() if "checkpoints" in after else ():
        found = after["checkpoints"].get(name)
        if found is None:
            yield f"checkpoint {name}: only before"
            continue
        files = files | {"config.json": without_deleted(files["config.json"], found["config.json"])}
        for file in sorted({*files, *found}):
            if files.get(file) != found.get(file):
                yield f"checkpoint {name}: {file} differs"
    for name, tokens in before.get("tokens", {}).items() if "tokens" in after else ():
        if tokens != after["tokens"].get(name):
            yield f"tokens of {name} differ"
    for arch, kernels in before.get("ptx", {}).items():
        found = after.get("ptx", {}).get(arch)
        if found is None:
            continue
        counts, others = Counter(ptx for _, ptx in kernels), Counter(ptx for _, ptx in found)
        for side, table, missing in (("before", kernels, counts - others), ("after", found, others - counts)):
            names = Counter(name for name, ptx in table if ptx in missing)
            yield from (f"ptx of {arch}: {count} of {name} only {side}" for name, count in names.items())


def record(file: Path, parts: list[str], architectures: tuple[str, ...]) -> None:
    """Write the record of this commit."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if {"checkpoints", "tokens"} & set(parts):
            found["checkpoints"] = record_checkpoints(Path(folder))
        if "tokens" in parts:
            found["tokens"] = record_tokens(Path(folder))
    if "ptx" in parts:
        found["ptx"] = record_ptx(architectures)
    file.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="write a record of this commit")
    recording.add_argument("file", type=Path)
    recording.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    recording.add_argument("--arch", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    comparing = commands.add_parser("compare", help="list what differs; exit 1 if anything does")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    commands.add_parser("tokens", help="print the greedy tokens of one checkpoint").add_argument("checkpoint")
    options = parser.parse_args()
    if options.command == "record":
        record(options.file, options.parts, tuple(options.arch))
    elif options.command == "tokens":
        print_tokens(options.checkpoint)
    else:
        found = list(differences(*(json.loads(file.read_text()) for file in (options.before, options.after))))
        print("\n".join(found) if found else "nothing differs")
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
