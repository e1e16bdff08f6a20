"""Check the files of a checkpoint before vLLM opens them: vLLM chooses by itself which files it takes weights from."""

import os
import re

from vllm.transformers_utils.repo_utils import list_filtered_repo_files

from vllm_latq.errors import CheckpointError
from vllm_latq.format.files import INDEX_FILE, SINGLE_FILE, is_weights, stray_files
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import check_headers

_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def check_files(model: str, revision: str | None) -> None:
    """Raise LatqError if vLLM could take weights from files that the index does not name, or if headers are wrong.

    A repository of the hub is not downloaded yet: only the names of its files are checked.

    Args:
        model: directory of the checkpoint, or its name on the hub.
        revision: of the repository; None for the default branch.
    """
    if os.path.isdir(model):
        # A directory may hold no weights: the weights are streamed from elsewhere, or are dummies.
        if any(is_weights(name) for name in os.listdir(model)):
            check_headers(CheckpointReader(model))
    elif model:
        names = {name for name in list_filtered_repo_files(model, ["*"], revision) if "/" not in name}
        shards = {name for name in names if _SHARD.fullmatch(name)} if INDEX_FILE in names else {SINGLE_FILE}
        if strays := stray_files(names, shards):
            hint = "vLLM may take weights from it in place of the verified ones: remove it, or serve a local copy."
            raise CheckpointError(model, "only the weight files of the index", ", ".join(strays), hint)
