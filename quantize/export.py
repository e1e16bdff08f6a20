"""Write a packed checkpoint in the format of compressed-tensors, which vLLM and transformers read without this package.

    quantized linear   NAME.qweight -> NAME.weight_packed, unchanged: both formats pack codes of b bits, z + 2^(b-1), as
                       one little-endian stream of bits per row; NAME.scales -> NAME.weight_scale;
                       NAME.weight_shape, in int64
    other tensors      unchanged
    config.json        a config group for each pair of bits and group size. The target of a group is one regular
                       expression that names its linears, by transformers' names, too, where these differ

Before version 0.18 the package compressed-tensors packed codes of 3 bits ten to a word; codes of 2, 4 and 8 bits have
been the same in all its versions. vLLM reads the dense form.

Invariant: everything is checked before anything is written, one shard is in memory at a time, and the directory appears
complete or not at all.
"""

import json
import math
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_latq.coding.packing import WORD_BITS
from vllm_latq.errors import CheckpointError, ConfigError, UnsupportedModelError
from vllm_latq.events import Progress, ignore_progress
from vllm_latq.format.config import without_note
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.files import INDEX_FILE, SINGLE_FILE
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.scheme import CONFIG_KEY, EXPORT_FORMATS, WHOLE_ROW, LayerScheme
from vllm_latq.format.tensors import SHAPE
from vllm_latq.models.experts import EXPERT
from vllm_latq.models.stored_names import check_mergeable, module_names
from vllm_latq.quantize.machine.durable_files import named_failures, rename_durably, sync
from vllm_latq.quantize.model.companion_files import copy_companions
from vllm_latq.quantize.model.loading import require_loadable
from vllm_latq.quantize.model.meta_model import is_encoder, meta_model, read_config
from vllm_latq.quantize.model.selection import merged_with
from vllm_latq.quantize.runs.card import CARD_FILE, front_matter
from vllm_latq.quantize.runs.writer import CHOOSE, free_destination, partial_of

(COMPRESSED_TENSORS,) = EXPORT_FORMATS
# Group sizes of Marlin, vLLM's kernel for 4 and 8 bits (vLLM 0.32, marlin_utils.MARLIN_SUPPORTED_GROUP_SIZES).
GROUP_SIZES = (WHOLE_ROW, 32, 64, 128)
# Bits that the package compressed-tensors packs densely only from this version on.
DENSE_SINCE = {3: "0.18"}
# Suffix of a tensor here -> its suffix there.
_RENAMED = {"qweight": "weight_packed", "scales": "weight_scale", SHAPE: SHAPE}
_AGAIN = "Quantize the model again with --method gptq, rtn, or latq --grid group"


def export_checkpoint(
    checkpoint: str | Path,
    destination: str | Path,
    to: str = COMPRESSED_TENSORS,
    progress: Progress = ignore_progress,
) -> None:
    """Write a checkpoint in another format.

    Args:
        checkpoint: directory of a checkpoint of this package.
        destination: directory to create. It appears complete or not at all.
        to: one of `EXPORT_FORMATS`.
        progress: called with the number of shards that are written, and of all.

    Raises:
        LatqError: the other format does not express the checkpoint, the checkpoint is damaged, or the destination is
            not empty.
    """
    if to not in EXPORT_FORMATS:
        raise ConfigError("to", f"one of {', '.join(EXPORT_FORMATS)}", repr(to))
    reader = CheckpointReader(checkpoint)
    model_config = read_config(reader.directory)
    if is_encoder(model_config):
        expected, hint = "a language model", "Serve it with the plugin: vLLM gives its linears other names."
        raise UnsupportedModelError(str(reader.directory), expected, "an encoder", hint)
    if reader.config.has_kv_scales:
        hint = "Quantize the model again without --kv-cache-scheme."
        raise ConfigError(str(reader.directory), "no scales of a KV cache, which an export leaves out", "some", hint)
    schemes = {name: _expressible(reader, name) for name in reader.shapes}
    _check_merged(reader, schemes)
    model = meta_model(reader.directory, model_config, torch.bfloat16)
    weights, where = [f"{name}.weight" for name in schemes], str(reader.directory)
    check_mergeable(model, [*reader.store.files, *weights], weights, where)
    modules = module_names(model, schemes, where)
    target = free_destination(destination, resume=True)
    partial = partial_of(target)
    if partial.exists():
        hint = "Remove it, or choose another directory."
        raise CheckpointError(str(partial), "no such directory", "one that a run or an export left", hint)
    with named_failures(partial, CHOOSE):
        partial.mkdir(parents=True)
        try:
            _write(reader, schemes, modules, partial, target.name, progress)
            require_loadable(partial, reader.directory)
            if target.exists():
                target.rmdir()
            sync(partial)
            rename_durably(partial, target)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _expressible(reader: CheckpointReader, name: str) -> LayerScheme:
    """Return the scheme of a linear; raise ConfigError if compressed-tensors, or vLLM's kernels, do not take it."""
    scheme = reader.config.scheme_for(name)
    where = f"{reader.directory}: {name}"
    if scheme is None:
        raise CheckpointError(where, "no quantized tensors for an ignored module", "some", "Fix `ignore`.")
    if name in reader.config.beside:
        expected, hint = "linears of the blocks and the head", "Quantize again without --embedding-bits and --mtp-bits."
        raise ConfigError(where, expected, "an embedding, or a layer that predicts further tokens", hint)
    if scheme.encoding != "packed":
        raise ConfigError(where, "integers on group scales", f"encoding {scheme.encoding}", f"{_AGAIN}.")
    if scheme.outliers:
        raise ConfigError(where, "no outliers, which compressed-tensors cannot store", "outliers", f"{_AGAIN}.")
    if scheme.midrise:
        hint = f"{_AGAIN}, without --grid midrise."
        raise ConfigError(where, "grid midtread: compressed-tensors has multiples of the scale", "midrise", hint)
    bits, group_size = scheme.code_layout()
    if group_size not in GROUP_SIZES:
        known = ", ".join(str(size) for size in GROUP_SIZES[1:])
        hint = "Quantize the model again with one of these --group-size."
        raise ConfigError(where, f"group size {known}, or -1, which vLLM's kernels take", str(group_size), hint)
    columns = reader.shapes[name][1]
    if EXPERT.match(name) and columns * bits % WORD_BITS:
        expected = f"experts whose rows of {bits}-bit codes are whole words, as vLLM reads them"
        hint = f"Leave the experts out: --ignore {_experts_of(name)}"
        raise ConfigError(where, expected, f"rows of {columns} codes", hint)
    return scheme


def _check_merged(reader: CheckpointReader, schemes: Mapping[str, LayerScheme]) -> None:
    """Raise ConfigError if linears that vLLM merges into one, or experts of one layer, have different schemes."""
    first_expert: dict[str, str] = {}
    for name, scheme in schemes.items():
        others = merged_with(name, schemes)
        if experts := _experts_of(name):
            others = [first_expert.setdefault(experts, name)]
        for other in others:
            if schemes[other] != scheme:
                expected = f"the bits and group size of {other}: vLLM makes one matrix of both"
                found = f"{schemes[other].code_layout()} there, {scheme.code_layout()} here"
                raise ConfigError(f"{reader.directory}: {name}", expected, found, f"{_AGAIN}, which keeps them equal.")


def _experts_of(name: str) -> str:
    """Return the name of the experts of a layer that a linear belongs to, or nothing."""
    match = EXPERT.match(name)
    return match[1] if match else ""


def _write(
    reader: CheckpointReader,
    schemes: Mapping[str, LayerScheme],
    modules: Mapping[str, str],
    partial: Path,
    name: str,
    progress: Progress,
) -> None:
    """Write all files of an export into its directory; `modules` maps linears to transformers' names of them."""
    shards: dict[str, list[str]] = defaultdict(list)
    for tensor, file in reader.store.files.items():
        module, _, suffix = tensor.rpartition(".")
        # A linear goes where its shape is, with all of its tensors.
        if module not in schemes or suffix in (SHAPE, "bias"):
            shards[file].append(tensor)
    weight_map, size = {}, 0
    for done, (file, tensors) in enumerate(shards.items()):
        progress(done, len(shards))
        stored = dict(_exported(reader, tensors, schemes))
        save_file(stored, partial / file, metadata={"format": "pt"})
        sync(partial / file)
        weight_map.update(dict.fromkeys(stored, file))
        size += sum(tensor.nbytes for tensor in stored.values())
        reader.store.close()
    progress(len(shards), len(shards))
    if list(shards) != [SINGLE_FILE]:
        _write_json(partial / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": weight_map})
    copy_companions(reader.directory, partial)
    (partial / CARD_FILE).write_text(_card(reader, schemes, name), encoding="utf-8")
    config = without_note(reader.document)
    named = {**schemes, **{module: schemes[linear] for linear, module in modules.items()}}
    _write_json(partial / "config.json", {**config, CONFIG_KEY: quantization_config(named)})


def _exported(
    reader: CheckpointReader, tensors: Collection[str], schemes: Mapping[str, LayerScheme]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name, tensor of everything that a shard of the export holds; a weight is validated when it is read."""
    for tensor in tensors:
        module, _, suffix = tensor.rpartition(".")
        if module not in schemes or suffix != SHAPE:
            yield tensor, reader.store.get(tensor)
            continue
        weight = reader.weight(module)
        assert isinstance(weight, PackedWeight)
        for own, found in weight.to_tensors().items():
            yield f"{module}.{_RENAMED[own]}", found.to(torch.int64) if own == SHAPE else found


def quantization_config(schemes: Mapping[str, LayerScheme]) -> dict[str, Any]:
    """Return the `quantization_config` of compressed-tensors for linears, name -> scheme."""
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, scheme in schemes.items():
        groups[scheme.code_layout()].append(name)
    return {
        "quant_method": COMPRESSED_TENSORS,
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [],
        "config_groups": {
            f"group_{index}": {
                "targets": [target_of(names)],
                "weights": {
                    "num_bits": bits,
                    "type": "int",
                    "symmetric": True,
                    "dynamic": False,
                    **(
                        {"strategy": "channel"}
                        if group_size == WHOLE_ROW
                        else {"strategy": "group", "group_size": group_size}
                    ),
                },
                "input_activations": None,
                "output_activations": None,
            }
            for index, ((bits, group_size), names) in enumerate(sorted(groups.items()))
        },
    }


def target_of(names: Collection[str]) -> str:
    """Return the target that names linears, and no others, in vLLM's models and in those of transformers.

    Both put the prefixes `model.`, `language_model.` and `transformer.` in different places. The numbers of experts are
    left out, because the experts of a layer are quantized all or not at all.
    """
    inner = {re.sub(r"(\.experts)\.\d+\.", r"\1.0.", name) for name in names}
    inner = {re.sub(r"^((model|language_model|transformer)\.)+", "", name) for name in inner}
    by_module: dict[str, set[str]] = defaultdict(set)
    for name in inner:
        module, _, leaf = name.rpartition(".")
        by_module[module].add(leaf)
    alternatives = []
    for module, leaves in sorted(by_module.items()):
        prefix = f"{module}." if module else ""
        pattern = re.escape(prefix).replace(r"\.experts\.0\.", r"\.experts\.\d+\.")
        alternatives.append(f"{pattern}({'|'.join(map(re.escape, sorted(leaves)))})")
    return rf"re:(.*\blanguage_model\.)?((model|transformer)\.)*({'|'.join(alternatives)})$"


def _card(reader: CheckpointReader, schemes: Mapping[str, LayerScheme], name: str) -> str:
    """Return the model card of an export, with the front matter of the checkpoint's card."""
    weights = sum(math.prod(shape) for shape in reader.shapes.values())
    by_bits: dict[int, int] = defaultdict(int)
    for linear, scheme in schemes.items():
        by_bits[scheme.code_layout()[0]] += math.prod(reader.shapes[linear])
    rows = "\n".join(f"| {bits} | {100 * count / weights:.1f}% |" for bits, count in sorted(by_bits.items()))
    method = printable_method(reader)
    needs = [
        f"Codes of {bits} bits need compressed-tensors {version} or newer in transformers."
        for bits, version in DENSE_SINCE.items()
        if bits in by_bits
    ]
    if by_bits.keys() & {2, 3}:
        needs.append("vLLM multiplies codes of 2 and 3 bits with its Humming kernels, on NVIDIA GPUs.")
    if len({scheme for linear, scheme in schemes.items() if EXPERT.match(linear)}) > 1:
        needs.append("Experts have several widths, which transformers cannot load; vLLM can.")
    return (
        f"""{front_matter(reader.directory, (COMPRESSED_TENSORS, "quantized"))}# {name}
A checkpoint of the method {method} of vllm-latq, exported to the format pack-quantized of compressed-tensors. Its codes
and scales are those of the checkpoint. It needs no plugin.

| bits of the codes | quantized weights |
|---|---|
{rows}

## Serve
```bash
vllm serve {shlex.quote(name)}
```

## Load with transformers
```bash
pip install transformers compressed-tensors
```

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({json.dumps(name)})
```

{" ".join(needs)}
""".rstrip()
        + "\n"
    )


def printable_method(reader: CheckpointReader) -> str:
    """Return the method of a checkpoint's recipe as code in Markdown, or "unknown"."""
    method = reader.config.recipe.get("method")
    return f"`{method}`" if isinstance(method, str) and re.fullmatch(r"\w+", method) else "unknown"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    sync(path)
