"""Lattice quantization (GPTQ as Babai's nearest plane) with an error guarantee, served by vLLM.

Importing this package registers the `latq` quantization method with transformers, so that
`AutoModelForCausalLM.from_pretrained` reads its checkpoints; without that it would load random weights. It is done when
transformers' models are imported, before or after this package: commands that need none start without them.
"""

from importlib import import_module
from types import ModuleType

from wrapt import when_imported

__version__ = "0.1.0"


@when_imported("transformers.quantizers")
def _import_models(_: ModuleType) -> None:
    """What may be asked for a quantizer without them must know this one."""
    import_module("transformers.modeling_utils")


@when_imported("transformers.modeling_utils")
def _register(_: ModuleType) -> None:
    from vllm_latq.integrations import transformers as transformers_loader  # noqa: F401
