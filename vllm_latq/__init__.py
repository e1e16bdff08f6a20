"""Lattice quantization (GPTQ as Babai's nearest plane) with an error guarantee, served by vLLM.

Importing this package registers the `latq` quantization method with transformers, so that
`AutoModelForCausalLM.from_pretrained` reads its checkpoints; without that it would load random weights.
"""

__version__ = "0.1.0"

from vllm_latq import transformers_loader as _registered  # noqa: F401
