"""Chat with a running server: one question per line, until the input ends. The server keeps nothing; this program does.

vllm serve CKPT --quantization latq &
python serving_examples/chat.py

A base model has no chat template: start the server with --chat-template FILE, or use openai_client.py.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from openai import OpenAI


def main(arguments: Sequence[str] | None = None) -> None:
    """Answer every line of the input, and print the answers as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://localhost:8000/v1", help="URL of the server")
    parser.add_argument("--api-key", default="none", help="value of `vllm serve --api-key`, if the server has one")
    parser.add_argument("--system", help="system message that opens the conversation")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens per answer (default 512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: always the likeliest token (default 0.7)")
    options = parser.parse_args(arguments)
    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "system", "content": options.system}] if options.system else []
    while question := _ask():
        messages.append({"role": "user", "content": question})
        pieces = []
        for event in client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            stream=True,
        ):
            pieces.append(event.choices[0].delta.content or "" if event.choices else "")
            print(pieces[-1], end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _ask() -> str:
    """Return the next line of the input, or an empty string at its end."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline().strip()


if __name__ == "__main__":
    main()
