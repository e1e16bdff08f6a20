"""Complete a batch of prompts with vLLM's offline engine, from a latq checkpoint.

    python serving_examples/offline_batch.py CKPT --prompt "import os" --prompt "The module"

On a CPU, add `--enforce-eager --kv-cache-memory-bytes 268435456`: vLLM otherwise asks for most of the machine's memory.
vLLM finds the plugin and reads the method from the checkpoint's config.json.
"""

import argparse
from collections.abc import Sequence

from vllm import LLM, SamplingParams

PROMPTS = ["The following example shows how to", "import os\n"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the completion of every prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CKPT", help="directory that `latq quantize` wrote")
    parser.add_argument("--prompt", action="append", help="prompt to complete; may be given several times")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens to generate per prompt")
    parser.add_argument("--max-model-len", type=int, default=256, help="tokens of prompt and completion together")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="number of GPUs per layer")
    parser.add_argument(
        "--kv-cache-memory-bytes", type=int, help="memory of the KV cache (default: what vLLM finds free)"
    )
    parser.add_argument("--enforce-eager", action="store_true", help="start faster: no torch.compile, no CUDA graphs")
    options = parser.parse_args(arguments)
    llm = LLM(
        options.checkpoint,
        max_model_len=options.max_model_len,
        tensor_parallel_size=options.tensor_parallel_size,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        enforce_eager=options.enforce_eager,
    )
    outputs = llm.generate(options.prompt or PROMPTS, SamplingParams(temperature=0, max_tokens=options.max_tokens))
    for output in outputs:
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


# The guard is needed: vLLM starts worker processes that import this file again.
if __name__ == "__main__":
    main()
