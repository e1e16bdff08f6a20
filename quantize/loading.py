"""Loads a model or checkpoint through transformers, for evaluation.

Invariant: a checkpoint of this package is never loaded without its quantizer being registered.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

import vllm_latq  # noqa: F401 - makes transformers know the latq format
from vllm_latq.errors import CheckpointError, ConfigError, LatqError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def default_device() -> str:
    """CUDA where there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(path: str | Path, device: str, dtype: str = "auto") -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Loads a causal language model, in evaluation mode, and its tokenizer.

    Args:
        path: a Hugging Face directory or hub name; a checkpoint of this package too.
        device: torch device.
        dtype: `auto` (as stored), or a torch dtype's name such as `float32`.

    Raises:
        CheckpointError: a model that cannot be found or read, or lacks weights or its tokenizer.
        ConfigError: no such device or dtype.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError("dtype", "auto, float32, bfloat16 or float16", repr(dtype))
    where = f"model {path}"
    if not Path(path).is_dir() and (Path(path).is_absolute() or Path(path).exists() or str(path).count("/") > 1):
        found = "a file" if Path(path).is_file() else "no such directory"
        raise CheckpointError(where, "a model directory or a hub name", found, "Check the path.")
    # transformers' own annotations of the auto classes do not know `output_loading_info`.
    causal_lm: Any = AutoModelForCausalLM
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model, info = causal_lm.from_pretrained(path, dtype=dtype, output_loading_info=True)
    except LatqError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        first_line = (str(error).splitlines() or [""])[0].rstrip(".")
        raise CheckpointError(
            where,
            "a model directory or a hub name that can be reached",
            f"{type(error).__name__}: {first_line}",
            "Check the path, and that config.json, the weights and the tokenizer are there and whole.",
        ) from error
    # transformers only warns about these, and would evaluate random weights or no text at all.
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(where, "all weights", f"{len(missing)} missing, such as {missing[0]}", "Copy it again.")
    if not tokenizer("text")["input_ids"]:
        raise CheckpointError(where, "a tokenizer", "none", "Copy tokenizer.json and tokenizer_config.json beside it.")
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        # torch: RuntimeError for an unknown device, AssertionError where CUDA is not compiled in.
        raise ConfigError("device", "a device torch can use", f"{device!r}: {error}") from error
