"""The grams of the inputs and the output gradients of each linear.

    forward:   tokens -> block 0 -> block 1 -> ... -> head       inputs of every block are kept
    labels are drawn from the model's own distribution; then
    backward:  head -> ... -> block 1 -> block 0                 each block is run again, with gradients, and freed

Several processes have a share of the tokens each, and the grams of all.

    H = E[x x^T],  x: input of a linear;   G = E[g g^T],  g: gradient of the log-likelihood with respect to its output

The log-likelihood is that of the counted positions: all of plain text, and in conversations those before a token of an
answer. G is the sum of g g^T over all tokens, divided by the number of counted positions, so that
(1/2) tr(G E H E^T) is nats per counted position for every linear. H is a mean over all tokens. An expert's H is a mean
over the tokens that are routed to it, and g = 0 for the others in its G. The experts of a layer may share one G up to
a factor, see `gram_sums`. Experts that few tokens reach are completed, see `experts`.

With labels from the model itself, G (x) H is the Kronecker-factored Fisher matrix, whose half is the curvature of the
KL divergence from the original model (Martens and Grosse, 2015). Everything refers to the unquantized model.

Invariant: one block is in memory at a time, and its grams; they go to disk, a file per block, last block first.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from vllm_latq.events import Progress, ignore_progress
from vllm_latq.quantize.calibration.fisher_files import StatisticsFiles
from vllm_latq.quantize.calibration.gram_sums import GramSums, LayerSums
from vllm_latq.quantize.machine.distributed import ALONE, World
from vllm_latq.quantize.machine.offload import Place, return_freed_memory
from vllm_latq.quantize.model.carried_state import Batch
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import Part, model_parts

# Tokens that pass forward and backward at a time. The head makes float32 logits of them and as large a gradient: 1.2 GB
# each of a vocabulary of 150,000.
TOKENS_PER_GRADIENT = 2048
# Marks positions that no loss is taken of.
NO_LABEL = -100

# Gives the progress of a stage, by its name.
Stages = Callable[[str], Progress]
STAGES = ("statistics, forward", "statistics, head", "statistics, backward")


def ignore_stages(_stage: str) -> Progress:
    """Ignore stages."""
    return ignore_progress


@dataclass(frozen=True)
class Backpropagation:
    """The calibration tokens, and the model that they pass forward and backward through.

    Attributes:
        decoder: the model.
        samples: token ids int64 [n, tokens], of all processes.
        wanted: full name -> linear whose statistics are wanted.
        seed: of the labels.
        place: moves hidden states to where they wait, the inputs of all blocks and the last one's outputs at once;
            gradients take the place of hidden states.
        world: the processes that share the run.
        scattered: whether each expert has a process that alone holds its Hessian.
        counted: positions whose next token has a label, bool [n, tokens], of all processes; None for all.
    """

    decoder: Decoder
    samples: torch.Tensor
    wanted: Mapping[str, nn.Linear]
    seed: int
    place: Place = lambda hidden: hidden
    world: World = ALONE
    scattered: bool = False
    counted: torch.Tensor | None = None

    @property
    def windows(self) -> torch.Tensor:
        """Indices of this process's samples, int64 [n]."""
        return self.world.split(torch.arange(len(self.samples)))

    @property
    def positions(self) -> int:
        """Number of labels of this process."""
        windows = self.windows
        return self.samples[windows].numel() if self.counted is None else int(self.counted[windows].sum())

    def embed(self) -> list[Batch]:
        """Return this process's tokens before the first block."""
        at_once = max(1, TOKENS_PER_GRADIENT // self.samples.shape[1])
        return self.decoder.embed(self.samples[self.windows], at_once, self.place)

    def parts(self) -> list[Part]:
        """Return every part of the model."""
        return model_parts(self.decoder, self.wanted)

    def forward(self, batches: list[Batch], progress: Progress) -> list[list[torch.Tensor]]:
        """Pass the tokens through all blocks; return each block's inputs and, last, the outputs of the last block."""
        *blocks, _ = self.parts()
        waiting = [[batch.hidden for batch in batches]]
        progress(0, len(blocks))
        for part in blocks:
            with part.weights() as block, torch.no_grad():
                waiting.append([self.place(part.run(block, batch)) for batch in batches])
            for batch, hidden in zip(batches, waiting[-1], strict=True):
                batch.hidden = hidden
            return_freed_memory()
            progress(part.index + 1, len(blocks))
        return waiting


def collect_statistics(run: Backpropagation, files: StatisticsFiles, stages: Stages = ignore_stages) -> None:
    """Run the model forward and backward once, and write the statistics of the wanted linears.

    Args:
        run: model and tokens.
        files: where the first process writes them; those there already, from an interrupted run, are left as they are.
        stages: gives the progress of three stages, whose parts take unlike times: all blocks forward, the head, all
            blocks backward.

    Raises:
        NumericalError: activations or gradients that are not finite, or a linear that was never called.
    """
    forward, at_head, backward = map(stages, STAGES)
    batches, (*blocks, head) = run.embed(), run.parts()
    inputs = run.forward(batches, forward)
    gradients = inputs.pop()
    at_head(0, 1)
    with head.weights() as module:
        statistics = head_statistics(run, head, module, gradients)
    _write(files, head, statistics, run.world)
    at_head(1, 1)
    for part in reversed(blocks):
        backward(len(blocks) - 1 - part.index, len(blocks))
        return_freed_memory()
        with part.weights() as module:
            statistics = block_statistics(run, part, module, batches, inputs.pop(), gradients, gradients)
        _write(files, part, statistics, run.world)
    backward(len(blocks), len(blocks))


def label_seeds(seed: int, windows: Iterable[int]) -> list[int]:
    """Return a seed for the labels of each window, from its index among the windows of all processes."""
    # A digest, because torch's generator on the CPU takes the low 32 bits only.
    digests = (hashlib.sha256(f"{seed} {window}".encode()).digest() for window in windows)
    return [int.from_bytes(digest[:8], "big") >> 1 for digest in digests]


def head_statistics(
    run: Backpropagation, part: Part, head: nn.Module, hidden: list[torch.Tensor]
) -> dict[str, LayerSums]:
    """Turn the last hidden states into the gradients of labels' log-likelihood, drawn with a seed for each window.

    Returns:
        The statistics of the wanted linears of the head.
    """
    device = part.decoder.device
    own, windows = run.windows, 0
    seeds = label_seeds(run.seed, own.tolist())
    sums = GramSums(part, head, run.world)
    with torch.enable_grad(), sums.watching():
        for waiting in hidden:
            states = waiting.to(device).detach().requires_grad_(True)
            logits = head(states).float()
            batch = slice(windows, windows + len(logits))
            labels = torch.stack([_draw(*each) for each in zip(logits.detach(), seeds[batch], strict=True)])
            if run.counted is not None:
                labels[~run.counted[own[batch]].to(device)] = NO_LABEL
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=NO_LABEL
            ).backward()
            waiting.copy_(_gradient(states))
            windows += len(logits)
    return sums.reduce(run.positions)


def _draw(logits: torch.Tensor, seed: int) -> torch.Tensor:
    """Labels [n] from the distributions of [n, vocabulary]."""
    generator = torch.Generator(device=logits.device).manual_seed(seed)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)


def block_statistics(
    run: Backpropagation,
    part: Part,
    block: nn.Module,
    batches: list[Batch],
    hidden: list[torch.Tensor],
    after: list[torch.Tensor],
    before: list[torch.Tensor] | None = None,
) -> dict[str, LayerSums]:
    """Return the statistics of the wanted linears of a block.

    Args:
        run: model and tokens.
        part, block: the block, with its weights in memory.
        batches: for the arguments of the block.
        hidden: hidden states before the block.
        after: gradients of the hidden states after the block.
        before: takes the gradients of the hidden states before the block, if given; may be `after`.
    """
    sums = GramSums(part, block, run.world, run.scattered)
    with sums.watching():
        for index, (batch, states) in enumerate(zip(batches, hidden, strict=True)):
            gradient = go_back(part, block, batch, states, after[index])
            if before is not None:
                before[index].copy_(gradient)

    def pass_all() -> None:
        for batch, states in zip(batches, hidden, strict=True):
            part.run(block, replace(batch, hidden=states))

    return sums.reduce(run.positions, pass_all)


def go_back(part: Part, block: nn.Module, batch: Batch, hidden: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the hidden states before a block, on the CPU, from the gradient of those after it."""
    decoder = part.decoder
    with torch.enable_grad():
        # Detached: the gradient must not live as long as the states, which are kept for the whole block.
        states = hidden.to(decoder.device).detach().requires_grad_(True)
        batch.handed_on.backward(after.to(decoder.device), decoder.forward, part.index, block, states, batch)
    return _gradient(states)


def _gradient(states: torch.Tensor) -> torch.Tensor:
    assert states.grad is not None
    return states.grad.to("cpu")


def _write(files: StatisticsFiles, part: Part, statistics: Mapping[str, LayerSums], world: World) -> None:
    """Write the statistics of a part.

    A file that an interrupted run wrote is kept, if it wrote the file for the same model.
    """
    parts = model_parts(part.decoder, ())
    # The head comes first, when everything was read.
    files.source = files.source or [part.decoder.digest(one.own_tensors()) for one in parts]

    def write() -> None:
        if not files.path(part.index).exists():
            return files.write(part.index, {name: layer.to(torch.device("cpu")) for name, layer in statistics.items()})
        files.read(part.index)
        for one, digest in zip(parts, files.noted[part.index], strict=True):
            one.require_same(digest, part.decoder.digest(one.own_tensors()), files.directory)

    if statistics:
        world.from_first(write)
