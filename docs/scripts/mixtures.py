"""Write docs/mixtures.md: what latq needs for large mixtures of experts, from shapes.

python docs/scripts/mixtures.py
"""

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "mixtures.md"
# Outputs of which one gram holds the correlations; wider linears have several.
LARGEST_BLOCK = 4096
WINDOWS, WINDOW = (256, 64), 2048
PROCESSES = 8
PASSES = 5


@dataclass(frozen=True)
class Mixture:
    """Sizes of a mixture of experts, as its config.json has them; weights and activations in bfloat16.

    Attributes:
        name: of the model.
        hidden, intermediate: channels of the residual stream and inside an expert.
        experts, chosen: routed experts of a layer, and those of one token.
        sparse, blocks: layers with experts, and all layers.
        streams: streams of hidden states.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    chosen: int
    sparse: int
    blocks: int
    streams: int = 1

    @property
    def block(self) -> int:
        """Bytes of the experts of one layer."""
        return 2 * self.experts * 3 * self.hidden * self.intermediate

    @property
    def weights(self) -> int:
        """Bytes of the experts of all layers."""
        return self.sparse * self.block

    @property
    def hessians(self) -> int:
        """Bytes of H of all experts of a layer: of the input of gate and up, and of the input of down."""
        return 4 * self.experts * (self.hidden**2 + self.intermediate**2)

    @property
    def gradients(self) -> int:
        """Bytes of G that the experts of a layer share: of gate, of up and of down."""
        return 2 * gram(self.intermediate) + gram(self.hidden)

    @property
    def statistics(self) -> int:
        """Bytes of H and G of every expert of the model, each by itself."""
        return self.sparse * (self.hessians + self.experts * self.gradients)

    def activations(self, tokens: int) -> int:
        """Return the bytes of the inputs of all blocks and the outputs of the last one."""
        return (self.blocks + 1) * tokens * self.streams * self.hidden * 2

    def routed(self, tokens: int) -> float:
        """Return the tokens of an expert, on average."""
        return tokens * self.chosen / self.experts

    def rows(self, tokens: int) -> int:
        """Return the bytes of the inputs of all experts of a layer, where rows stand for H."""
        return 2 * tokens * self.chosen * (self.hidden + self.intermediate)

    @property
    def reads(self) -> int:
        """Bytes that a run reads."""
        return PASSES * self.weights


def gram(outputs: int) -> int:
    """Return the bytes of the diagonal blocks of one G."""
    whole, rest = divmod(outputs, LARGEST_BLOCK)
    return 4 * (whole * LARGEST_BLOCK**2 + rest**2)


MODELS = (
    Mixture("GLM-5.3-Flash", 4096, 2048, 288, 8, 42, 45, streams=4),
    Mixture("MiniMax-M3", 6144, 3072, 128, 4, 60, 60),
)

HEAD = """# Large mixtures of experts
`latq` measures the loss of the whole model: the grams H of each linear's inputs and G of the gradients at its outputs.
A mixture of 400 billion weights has several times its own size of them. This page says how a run does without, and what
it needs. `docs/scripts/mixtures.py` writes the page, and a test compares its formulas with `--dry-run`.

## Statistics are made again
Statistics of at most 64 GB stay on disk until the run ends. Larger statistics are never on disk:

1. The text passes forward through the model. The inputs of every block are kept.
2. The text passes backward. The gradient after each block takes the place of the inputs of the block.
3. The allocation passes forward twice. Each block is run with gradients, from its inputs and the gradient after it. Its
   grams are used, and dropped.
4. The run quantizes block after block. It makes the grams of each block once more.

- The numbers are those of statistics on disk, so the checkpoint is byte-identical. On a GPU this holds as far as the
  kernels of the backward pass repeat their sums.
- The allocation is kept on disk: 16 bytes for every 64 x 128 weights, or of `--grid group` 64 bytes for every linear. A
  resumed run takes it from there, after the first two passes. `latq verify --certificate` takes all passes.
- The passes cost little beside the search for codes.

## Experts
- **One G per layer.** If the G of a block's experts would take more than 8 GB, the experts of a layer share one G for
  gate, one for up and one for down: the mean over the tokens of all experts. Each expert has a factor of its own, which
  makes the trace of G that of the expert's own gradients. This assumes that the experts differ in how much they matter,
  and not in the direction of their gradients. [What it costs](#what-sharing-g-costs)
- **Rows in place of H.** An expert that has seen fewer tokens than it has channels holds the inputs of these tokens,
  and not the larger matrix of channels by channels.
- **Experts over processes.** With `torchrun`, each expert has one process. It alone gets the expert's H, allocates its
  bits and quantizes it. The H of experts are never summed on all processes.

"""
"""Text above the tables."""

FORMULAS = """## Formulas
| | bytes |
|---|---|
| experts of a layer | 2 * experts * 3 * hidden * intermediate |
| H of these | 4 * experts * (hidden^2 + intermediate^2) |
| G of these | 4 * (2 * intermediate^2 + hidden^2), in diagonal blocks of 4096 |
| statistics on disk, were they kept | layers * (H + experts * G) |
| rows of a block, in place of H | 2 * tokens * chosen * (hidden + intermediate) |
| activations | 2 * (blocks + 1) * tokens * streams * hidden |
| reads | 5 * weights |

## Two models
GB of the experts alone, with windows of 2048 tokens, in bfloat16. `--offload disk` keeps activations on disk.

"""


def table() -> str:
    """Return the table of bytes."""
    rows = [("billions of weights in experts", [mixture.weights / 2e9 for mixture in MODELS])]
    rows += [
        (name, [getattr(mixture, key) / 1e9 for mixture in MODELS])
        for name, key in (
            ("weights", "weights"),
            ("largest block", "block"),
            ("statistics on disk, were they kept", "statistics"),
        )
    ]
    rows.append(("statistics on disk", [0.0 for _ in MODELS]))
    rows += [
        (f"activations, {count} windows", [mixture.activations(count * WINDOW) / 1e9 for mixture in MODELS])
        for count in WINDOWS
    ]
    rows += [
        (f"tokens of an expert, {count} windows", [mixture.routed(count * WINDOW) for mixture in MODELS])
        for count in WINDOWS
    ]
    rows += [
        ("H of a block, one process", [mixture.hessians / 1e9 for mixture in MODELS]),
        (
            f"H of a block, of the experts of one of {PROCESSES} processes",
            [mixture.hessians / PROCESSES / 1e9 for mixture in MODELS],
        ),
        (
            f"rows of a block, one of {PROCESSES} processes, {WINDOWS[0]} windows",
            [mixture.rows(WINDOWS[0] * WINDOW // PROCESSES) / 1e9 for mixture in MODELS],
        ),
        ("G of a block", [mixture.gradients / 1e9 for mixture in MODELS]),
        ("G of a block, were it not shared", [mixture.experts * mixture.gradients / 1e9 for mixture in MODELS]),
        ("reads of each process", [mixture.reads / 1e9 for mixture in MODELS]),
    ]
    lines = [["", *(mixture.name for mixture in MODELS)], ["---"] * (len(MODELS) + 1)]
    lines += [[name, *(_number(value) for value in values)] for name, values in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value else "0"


def page() -> str:
    """Return the text of the page."""
    return f"{HEAD}{FORMULAS}{table()}\n{END}"


END = """
- No model of this size has been quantized here. The numbers are computed from shapes.
- The weights of one block and its H must fit the device. More processes help with H, and `--num-samples 64` with
  activations.
- While a block runs, each process collects its own tokens for all experts. With 8 processes and 256 windows these are
  fewer than the channels, so rows stand for H. Afterwards each process keeps the H of its own experts.

## What sharing G costs
A mixture of 16 experts, 2 of them for each token, was trained for eight minutes on the calibration text of the tests
and quantized with 64 windows of 256 tokens. KL on 85 windows of held-out text, in nats per token:

| bits | G of each expert | shared G | ratio |
|---|---|---|---|
| 3 | 9.94e-03 | 1.06e-02 | 1.06 |
| 2 | 4.79e-02 | 4.96e-02 | 1.04 |

So experts with less than 8 GB of G in a block keep their own. The experts have 0.8 million weights. Large mixtures were
not measured.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
