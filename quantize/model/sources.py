"""Which stored tensor each tensor of a model is read from, and whether it is there and has its shape.

Invariant: no weight is read to find that out, only the files' headers, but for a head that is tied and stored as well.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vllm_latq.errors import UnsupportedModelError
from vllm_latq.format.files import TensorStore


def tensor_sources(model: Any, stored: dict[str, str], embedding: str, store: TensorStore) -> dict[str, str]:
    """Name of each tensor of a model -> name in the checkpoint of what it is read from.

    A tied head is read from the embedding; other names of one tensor from the first of them that is stored.

    Args:
        model: on the meta device.
        stored: name of each of its tensors -> its own name in the checkpoint, see `stored_names`.
        embedding: name of the token embedding in the model.
    """
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensors[name]): at for name, at in reversed(stored.items()) if at in store}
    first[id(tensors[embedding])] = stored[embedding]
    return {name: first.get(id(tensors[name]), at) for name, at in stored.items()}


def check_sources(model: Any, sources: Mapping[str, str], store: TensorStore) -> None:
    """Raise CheckpointError for a missing tensor, UnsupportedModelError for one of another shape than the model's."""
    tensors = model.state_dict()
    for name, source in sources.items():
        if (found := store.shape(source)) != tuple(tensors[name].shape):
            where, expected = f"{store.directory}: {source}", f"shape {tuple(tensors[name].shape)}"
            raise UnsupportedModelError(where, expected, f"{found}", "Is config.json its own?")


def check_tied(heads: Iterable[str], embedding: str, store: TensorStore) -> None:
    """Raise UnsupportedModelError if a tied head is stored with other values: transformers would read it, vLLM not.

    Args:
        heads: names of tied heads' weights in the checkpoint, if they were stored.
        embedding: name of the embedding there.
    """
    for head in heads:
        if head in store and not torch.equal(store.get(head), store.get(embedding)):
            hint = "Set tie_word_embeddings to false in config.json, or remove the tensor."
            raise UnsupportedModelError(f"{store.directory}: {head}", f"what {embedding} holds", "other values", hint)
    store.close()
