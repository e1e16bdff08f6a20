"""Entry point of the vLLM plugin (group `vllm.general_plugins`).

vLLM calls `register` in the API server, the engine core, every worker and a model-inspection subprocess, sometimes
more than once in a process. If importing this module failed, vLLM would only log it. So the module imports nothing.
"""


def register() -> None:
    """Make `quant_method: latq` and `--quantization latq` known to vLLM, and check what it loads of such checkpoints.

    Calling it again changes nothing.
    """
    # The class `LatqConfig` registers itself when its module is first imported.
    from vllm_latq.integrations.vllm.loading import install

    install()
