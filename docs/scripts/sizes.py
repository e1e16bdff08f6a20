"""Print the tables of docs/choose.md: sizes of common models by bits, and the bits that fit a GPU, all from shapes.

python docs/scripts/sizes.py
"""

import math
from dataclasses import dataclass

BITS = (2.0, 2.5, 3.0, 3.5, 4.0, 16.0)
GPUS = (8, 12, 16, 24, 48, 80)
# GB that stay free for KV cache, activations and vLLM.
RESERVE = 2.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, as its config.json has them. `heads` and `kv_heads` count channels, not heads."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False

    def gigabytes(self, bits: float) -> float:
        """Return the size with linears and head at `bits`, the embedding in bfloat16; 16 bits is the original."""
        attention = self.hidden * (2 * self.heads + 2 * self.kv_heads)
        embedding = self.hidden * self.vocabulary
        linears = self.layers * (attention + 3 * self.hidden * self.intermediate)
        # A head that shares the embedding's matrix gets a matrix of its own when it is quantized.
        head = 0 if self.tied and bits == 16 else embedding
        return ((linears + head) * bits + embedding * 16) / 8e9


MODELS = (
    Shape("Qwen3-0.6B", 1024, 3072, 28, 2048, 1024, 151936, tied=True),
    Shape("Qwen3-4B", 2560, 9728, 36, 4096, 1024, 151936, tied=True),
    Shape("Qwen3-8B", 4096, 12288, 36, 4096, 1024, 151936),
    Shape("Llama-3.1-8B", 4096, 14336, 32, 4096, 1024, 128256),
    Shape("Qwen3-14B", 5120, 17408, 40, 5120, 1024, 151936),
    Shape("Qwen3-32B", 5120, 25600, 64, 8192, 1024, 151936),
    Shape("Llama-3.1-70B", 8192, 28672, 80, 8192, 1024, 128256),
)


def sizes() -> str:
    """Return the table of gigabytes by bits."""
    head = ["model", *(f"{bits:g} bits" for bits in BITS[:-1]), "bf16"]
    return _table(head, [[model.name, *(f"{model.gigabytes(bits):.1f}" for bits in BITS)] for model in MODELS])


def fitting() -> str:
    """Return the table of the largest half bits from 2 to 6 that leave RESERVE free, by memory."""
    head = ["model", *(f"{memory} GB" for memory in GPUS)]
    return _table(head, [[model.name, *(_fits(model, memory) for memory in GPUS)] for model in MODELS])


def _fits(model: Shape, memory: int) -> str:
    fixed, per_bit = model.gigabytes(0), model.gigabytes(1) - model.gigabytes(0)
    bits = min(6.0, math.floor(2 * (memory - RESERVE - fixed) / per_bit) / 2)
    return f"{bits:g}" if bits >= 2 else ""


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    print(f"{sizes()}\n\n{fitting()}")
