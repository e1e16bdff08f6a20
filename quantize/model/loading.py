"""Finds a model or checkpoint, and loads it through transformers for evaluation.

Invariant: what is loaded is complete; transformers would fill in missing weights at random and only warn. That it reads
checkpoints of this package comes from importing `vllm_latq`.
"""

import re
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from vllm_latq.errors import CheckpointError, ConfigError, LatqError, summary
from vllm_latq.format.files import shard_names
from vllm_latq.quantize.model.companion_files import CODE, OTHER_WEIGHTS
from vllm_latq.quantize.model.meta_model import auto_class, is_encoder, load_config, meta_model, read_config
from vllm_latq.quantize.model.originals.store import OriginalStore
from vllm_latq.quantize.recipe import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Many repositories hold copies of the weights in other formats than safetensors.
LEFT_ON_THE_HUB = [*OTHER_WEIGHTS, *CODE]
# Weights of further steps of sentence-transformers, which no index names.
STEP_WEIGHTS = "[0-9]_*/*.safetensors"
# Words, numbers, a line end and letters beyond ASCII: tokenizers that differ make other tokens of it.
PROBE = "The 3 cafés\n  open at 07:30 (寿司)."
HUB_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")


def torch_device(name: str | None = None) -> torch.device:
    """The device of that name; None for CUDA where there is one, else the CPU.

    Nothing is put on it: of several processes each will take a GPU of its own.

    Raises:
        ConfigError: torch does not know it, or not on this machine.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        count = torch.get_device_module(device.type).device_count()
    except RuntimeError as error:
        raise ConfigError("device", "a device torch can use", f"{name!r}: {error}") from error
    kind = device.type.upper()
    if not count:
        hint = f"Use --device cpu, or install a {kind} build of torch and its driver."
        raise ConfigError("device", "a device torch can use", f"no {kind} device", hint)
    if (device.index or 0) >= count:
        hint = "Devices are numbered from 0."
        raise ConfigError("device", "a device torch can use", f"{name!r} of {count} {kind} device(s)", hint)
    return device


def model_directory(name: str | Path) -> Path:
    """The local directory of a model: the one named, or a snapshot of a hub repository, downloaded if need be.

    Many repositories hold the weights in several formats: only the shards that the index names are downloaded.

    Raises:
        CheckpointError: neither a directory nor a hub name that can be reached.
    """
    path, where = Path(name), f"model {name}"
    if str(name) and path.is_dir():
        return path
    if not HUB_NAME.fullmatch(str(name)) or path.exists():
        found = "a file" if path.is_file() else "no such directory"
        raise CheckpointError(where, "a model directory or a hub name org/name", found, "Check the path.")
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(str(name), ignore_patterns=[*LEFT_ON_THE_HUB, "*.safetensors"]))
        weights = [*sorted(map(escape, shard_names(snapshot))), STEP_WEIGHTS]
        return Path(snapshot_download(str(name), allow_patterns=weights, revision=snapshot.name))
    except LatqError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(
            where,
            "a model directory or a hub name that can be reached",
            summary(error),
            "Check the name and the connection to the hub.",
        ) from error


def config_directory(name: str | Path) -> Path:
    """Return a local directory with the config.json of a model: the one named, or a download of that file alone.

    Raises:
        CheckpointError: neither a directory nor a hub name that can be reached.
    """
    if Path(name).is_dir() or Path(name).exists() or not HUB_NAME.fullmatch(str(name)):
        return model_directory(name)
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(name), "config.json")).parent
    except (OSError, ValueError) as error:
        expected, hint = "a model directory or a hub name that can be reached", "Check the name and the connection."
        raise CheckpointError(f"model {name}", expected, summary(error), hint) from error


def load_configuration(path: str | Path) -> Any:
    """Return the configuration of a model or checkpoint, by its directory or hub name.

    Raises:
        CheckpointError: there is none that transformers can read, or no such model.
    """
    directory = model_directory(path)
    try:
        return read_config(directory)
    except (AttributeError, KeyError, OSError, TypeError, ValueError, StrictDataclassError) as error:
        raise CheckpointError(f"model {path}", "a model that transformers can load", summary(error)) from error


def load_tokenizer(directory: str | Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model directory.

    Raises:
        CheckpointError: there is none, or none that transformers can read.
    """
    from transformers import AutoTokenizer

    where, hint = f"model {directory}", "Copy tokenizer.json and tokenizer_config.json beside it."
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    # The tokenizers library raises a bare Exception.
    except Exception as error:
        raise CheckpointError(where, "a tokenizer that transformers can load", summary(error), hint) from error
    # Where there are no files, transformers makes a tokenizer without a vocabulary: it would read no text at all.
    if not tokenizer("text")["input_ids"]:
        raise CheckpointError(where, "a tokenizer", "none", hint)
    return tokenizer


def require_loadable(checkpoint: Path, source: Path) -> None:
    """Raise CheckpointError unless transformers loads the configuration and the tokenizer of a checkpoint.

    Args:
        checkpoint: directory with the config.json and the companion files of the checkpoint.
        source: the model that was quantized. Where transformers loads no tokenizer of it, none is asked for.
    """
    hint = f"Check the files beside the weights in {source}, and go on with --resume."
    try:
        read_config(checkpoint)
    except (AttributeError, KeyError, OSError, TypeError, ValueError, StrictDataclassError) as error:
        where = f"{checkpoint}/config.json"
        raise CheckpointError(where, "a configuration that transformers can load", summary(error), hint) from error
    try:
        original = load_tokenizer(source)
    except CheckpointError:
        return
    try:
        same = load_tokenizer(checkpoint)(PROBE)["input_ids"] == original(PROBE)["input_ids"]
    except CheckpointError as error:
        raise CheckpointError(error.where, error.expected, error.found, hint) from error
    if not same:
        raise CheckpointError(str(checkpoint), "the tokenizer of the model", "one that gives other tokens", hint)


def compute_dtype(name: str) -> torch.dtype | None:
    """Return the torch dtype that one of the recipe's `DTYPES` names; None for "auto", where a `Decoder` chooses."""
    if name == "auto":
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load_model(
    path: str | Path, device: str | None, dtype: str = "auto"
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Loads a causal language model, in evaluation mode, and its tokenizer.

    An original that is dequantized is in memory twice meanwhile: its tensors, and the model.

    Args:
        path: a Hugging Face directory or hub name; a checkpoint of this package too.
        device: torch device; None for CUDA where there is one, else the CPU.
        dtype: float32, bfloat16, float16, or `auto`: float32 on a CPU, as stored elsewhere. On a CPU bf16
            saves no time, and its rounding adds about 1e-4 nats to a KL divergence.

    Raises:
        CheckpointError: a model that cannot be found or read, or lacks weights or its tokenizer.
        ConfigError: no such device or dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError("dtype", "auto, float32, bfloat16 or float16", repr(dtype))
    where = f"model {path}"
    chosen = torch_device(device)
    directory = model_directory(path)
    if dtype == "auto" and chosen.type == "cpu":
        dtype = "float32"
    try:
        config = read_config(directory)
        if is_encoder(config):
            expected = "a causal language model, which predicts next tokens"
            raise CheckpointError(where, expected, "an encoder", "Compare its embeddings on your own task.")
        tokenizer = load_tokenizer(directory)
        options = {"dtype": dtype, "output_loading_info": True}
        store = OriginalStore(directory)
        if store.dequantizes:
            # transformers computes with rounded inputs on some GPUs, needs other packages for some forms, and wants
            # whole blocks.
            config = load_config(directory)
            weights = {name: store.get(name) for name in store.names()}
            made = type(meta_model(directory, config, torch.bfloat16))
            model, info = made.from_pretrained(None, config=config, state_dict=weights, **options)
        else:
            # Else transformers asks on the terminal whether to run a model's own code, and reads pickles.
            own_code = {"trust_remote_code": False, "use_safetensors": True}
            model, info = auto_class(config).from_pretrained(directory, config=config, **options, **own_code)
    except LatqError:
        raise
    except (AttributeError, OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
        raise CheckpointError(
            where,
            "a model that transformers can load",
            summary(error),
            "Check that config.json, the weights and the tokenizer are there and whole.",
        ) from error
    # transformers only warns about these, and would evaluate random weights.
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(where, "all weights", f"{len(missing)} missing, such as {missing[0]}", "Copy it again.")
    return model.to(chosen).eval(), tokenizer
