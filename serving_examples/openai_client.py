"""Ask a running server for a completion, and print the probability of each of its tokens.

vllm serve CKPT --max-model-len 256 &
python serving_examples/openai_client.py --prompt "import os"
"""

import argparse
import math
from collections.abc import Sequence

from openai import OpenAI


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the completion, then one line per token."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://localhost:8000/v1", help="URL of the server")
    parser.add_argument("--api-key", default="none", help="value of `vllm serve --api-key`, if the server has one")
    parser.add_argument("--prompt", default="The following example shows how to", help="prompt to complete")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens to generate")
    options = parser.parse_args(arguments)
    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    model = client.models.list().data[0].id
    answer = client.completions.create(
        model=model, prompt=options.prompt, max_tokens=options.max_tokens, temperature=0, logprobs=1
    )
    choice = answer.choices[0]
    print(f"{options.prompt!r} -> {choice.text!r}")
    if choice.logprobs is not None:
        for token, logprob in zip(choice.logprobs.tokens or [], choice.logprobs.token_logprobs or [], strict=True):
            print(f"{math.exp(logprob):8.4f}  {token!r}")


if __name__ == "__main__":
    main()
