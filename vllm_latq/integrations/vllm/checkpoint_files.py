"""Check the files of a checkpoint before vLLM opens them: vLLM chooses by itself which files it takes weights from."""

import os
import re
from functools import cache

from vllm.transformers_utils.repo_utils import list_filtered_repo_files

from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.files import INDEX_FILE, SINGLE_FILE, is_weights, stray_files
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import check_headers, verify

# Set to 1, this environment variable makes vLLM verify the whole checkpoint before it loads it.
VERIFY = "LATQ_VERIFY"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def check_files(model: str, revision: str | None) -> None:
    """Raise LatqError if vLLM could take weights from files that the index does not name, or if headers are wrong.

    With LATQ_VERIFY=1, raise the first problem that `latq verify` would report. A repository of the hub is not
    downloaded yet: only the names of its files are checked.

    Args:
        model: directory of the checkpoint, or its name on the hub.
        revision: of the repository; None for the default branch.
    """
    if (asked := os.environ.get(VERIFY, "0")) not in ("0", "1"):
        raise ConfigError(f"environment variable {VERIFY}", "0 or 1", repr(asked))
    if asked == "1":
        _verify_once(os.path.abspath(model) if os.path.isdir(model) else model)
    elif os.path.isdir(model):
        # A directory may hold no weights: the weights are streamed from elsewhere, or are dummies.
        if any(is_weights(name) for name in os.listdir(model)):
            check_headers(CheckpointReader(model))
    elif model:
        names = {name for name in list_filtered_repo_files(model, ["*"], revision) if "/" not in name}
        shards = {name for name in names if _SHARD.fullmatch(name)} if INDEX_FILE in names else {SINGLE_FILE}
        if strays := stray_files(names, shards):
            hint = "vLLM may take weights from it in place of the verified ones: remove it, or serve a local copy."
            raise CheckpointError(model, "only the weight files of the index", ", ".join(strays), hint)


@cache
def _verify_once(model: str) -> None:
    """Raise the first problem of a whole checkpoint. Success is remembered: vLLM asks more than once in a process."""
    if not os.path.isdir(model):
        hint = f"Run `hf download {model} --local-dir DIR`, and serve DIR."
        raise ConfigError(f"environment variable {VERIFY}", "a model in a local directory", repr(model), hint)
    for problem in verify(model):
        raise problem
