"""Lattice quantization (GPTQ as Babai's nearest plane) with an error guarantee, served by vLLM.

Importing this package registers the `latq` quantization method with transformers, so that
`AutoModelForCausalLM.from_pretrained` reads its checkpoints; without the method transformers raises an error. The
method is registered when transformers' models are imported, before or after this package, so commands that need no
model start without importing transformers.
"""

from importlib import import_module
from types import ModuleType

from wrapt import when_imported

__version__ = "0.1.0"


@when_imported("transformers.quantizers")
def _import_models(_: ModuleType) -> None:
    """Import transformers' models: its quantizers can be asked for `latq` before the models are imported."""
    import_module("transformers.modeling_utils")


@when_imported("transformers.modeling_utils")
def _register(_: ModuleType) -> None:
    from vllm_latq.integrations import transformers as transformers_loader  # noqa: F401
