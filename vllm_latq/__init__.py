"""Lattice quantization (GPTQ as Babai's nearest plane) with an error guarantee, served by vLLM.

    vllm_latq.quantize("Qwen/Qwen3-8B", "out", bits=3)
    vllm_latq.evaluate("out", "text.txt", baseline="Qwen/Qwen3-8B")

Importing this package registers the `latq` quantization method with transformers, so that
`AutoModelForCausalLM.from_pretrained` reads its checkpoints; without the method transformers raises an error. The
method is registered when transformers' models are imported, before or after this package, so commands that need no
model start without importing transformers.
"""

from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from wrapt import when_imported

if TYPE_CHECKING:
    from vllm_latq.api import evaluate as evaluate
    from vllm_latq.api import export as export
    from vllm_latq.api import quantize as quantize
    from vllm_latq.api import trace as trace

__version__ = "0.1.0"


@when_imported("transformers.quantizers")
def _import_models(_: ModuleType) -> None:
    """Import transformers' models: its quantizers can be asked for `latq` before the models are imported."""
    # Fails where a module that the models need imports the quantizers first. The models come later then.
    with suppress(ImportError):
        import_module("transformers.modeling_utils")


@when_imported("transformers.modeling_utils")
def _register(_: ModuleType) -> None:
    from vllm_latq.integrations import transformers as transformers_loader  # noqa: F401


class _CallablePackage(ModuleType):
    """The package `vllm_latq.quantize`, which is also the function `vllm_latq.api.quantize`.

    The first import of one of its modules would replace a function of its name. Python lets a module have a class of
    its own, so the package and the function are one object, in any order of imports.
    """

    def __call__(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Quantize a model, see `vllm_latq.api.quantize`."""
        from vllm_latq.api import quantize

        return quantize(*arguments, **options)


import_module("vllm_latq.quantize").__class__ = _CallablePackage


def __getattr__(name: str) -> Any:
    """Import the functions `evaluate`, `export` and `trace` when they are used."""
    if name not in ("evaluate", "export", "trace"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("vllm_latq.api"), name)
