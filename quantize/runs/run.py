"""One quantization run: it takes the parts of a model one after the other.

    for each part:  a quantizer quantizes its linears on the activations of the quantized prefix  -> shard, records
                    the text passes the part again, quantized                                     -> the next part

Invariant: what the next block sees is computed with the weights that were written, so a resumed run, which reads them
back, continues exactly where an uninterrupted one would be.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

import vllm_latq
from vllm_latq.events import Listener, seconds_left
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.reader import fingerprint_of
from vllm_latq.memory import peak_memory
from vllm_latq.quantize.calibration.stream import Stream, Visit, walk
from vllm_latq.quantize.machine.distributed import World
from vllm_latq.quantize.machine.offload import Place, return_freed_memory
from vllm_latq.quantize.methods.record import totals
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.parts import Part, dense_weight, model_parts, stored_tensors
from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.runs.card import base_model
from vllm_latq.quantize.runs.writer import CheckpointWriter

Record = dict[str, Any]
Records = Sequence[Record]
T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """Everything that a run works with.

    Attributes:
        recipe: what to do.
        decoder: the model.
        quantized: full name -> linear of everything that the recipe quantizes.
        writer: of the checkpoint; only the first process writes with it.
        emit: called with an event, a plain dict.
        world: the processes that share the run.
        counted: positions of the samples whose loss is taken, bool [n, tokens], of all processes; None for all.
    """

    recipe: Recipe
    decoder: Decoder
    quantized: Mapping[str, nn.Linear]
    writer: CheckpointWriter
    emit: Listener
    world: World
    counted: torch.Tensor | None = None

    def stream(self, samples: torch.Tensor | None, place: Place) -> Stream:
        """Return the stream of this process's share of the samples (of all processes), or an empty one without."""
        mine = None if samples is None else self.world.split(samples)
        return Stream(self.decoder, mine, self.recipe.target, self.world, place)


class Quantized(NamedTuple):
    """The quantized linears of one input.

    Attributes:
        records: linear -> its record.
        tensors: name -> tensor to be stored, on the CPU.
    """

    records: dict[str, Record]
    tensors: dict[str, torch.Tensor]


class Quantizer(Protocol[T]):
    """Quantizes the linears of a part, one input after the other. T describes one input."""

    def inputs(self, part: Part, module: nn.Module, stream: Stream, earlier: Records) -> Sequence[T]:
        """Return the inputs of the part's linears; carries the original stream past the part.

        `earlier` are the records of the linears of all earlier parts.
        """

    def effort(self, one: T) -> int:
        """Return how much work an input is, to share the inputs out over processes."""

    def owner(self, one: T) -> int | None:
        """Return the process that must quantize an input; None if any can."""

    def quantize(self, one: T, part: Part) -> Quantized:
        """Quantize the linears of one input and emit their records.

        Leaves the quantized weights in the part if anything passes through it.
        """


@dataclass
class Run:
    """One quantization run.

    Attributes:
        session: what it works with.
        quantizer: quantizes the linears of each part.
        stream: the calibration text on its way through the blocks.
        layers: records of the linears so far.
        source: digest of the tensors of the model that embed the text, and of all parts so far.
    """

    session: Session
    quantizer: Quantizer[Any]
    stream: Stream
    layers: list[Record] = field(default_factory=list)
    source: str = ""

    def parts(self) -> None:
        """Quantize every part of the model and write its shard."""
        parts = model_parts(self.session.decoder, self.session.quantized)
        seconds, quantized, started = 0.0, 0, time.perf_counter()
        for visit in walk(parts, self.stream):
            part, linears = visit.part, visit.part.linears
            resumed = self._part(visit)
            if linears and not resumed:
                seconds, quantized = seconds + time.perf_counter() - started, quantized + 1
            # The head takes another time than a block.
            left = seconds_left(seconds, quantized, sum(bool(later.linears) for later in parts[part.index + 1 : -1]))
            done = {"block": part.index, "linears": len(linears), "resumed": resumed, "seconds_left": left}
            self.session.emit({"event": "block", **done})
            return_freed_memory()
            started = time.perf_counter()

    def _part(self, visit: Visit) -> bool:
        """Quantize, or read back, the linears of one part, and write its shard; return whether it was read back."""
        part, module, _ = visit
        world, writer = self.session.world, self.session.writer
        earlier = world.from_first(lambda: writer.records(part.index))
        if earlier is not None:
            part.require_same(earlier.get("source", ""), self._noted_source(part), writer.partial)
            if visit.advances and module is not None:
                self.stream.skip(part, module)
            self._read_back(part, earlier["digests"])
            self.layers.extend(earlier["layers"])
            return True
        tensors, records = part.untouched_tensors(), []
        if module is not None:
            found = self._quantize(part, module)
            tensors |= found.tensors
            records = [found.records[name] for name in part.linears]
        source = self._noted_source(part)
        world.from_first(lambda: writer.add(part.index, tensors, {"layers": records, "source": source}))
        self.layers.extend(records)
        return False

    def _noted_source(self, part: Part) -> str:
        """Add a part to the digest of everything that was read so far, and return the digest.

        All of the part was read for its shard; of a shard that is read back, only what is quantized.
        """
        decoder = self.session.decoder
        if not self.source and self.stream:
            self.source = decoder.digest(decoder.embedding_tensors)
        names = part.own_tensors() | set(part.untouched_names())
        self.source = fingerprint_of([self.source, decoder.digest(names)])
        return self.source

    def _quantize(self, part: Part, module: nn.Module) -> Quantized:
        """Quantize the inputs of a part's linears, shared out over the processes; all processes get everything."""
        world, quantizer = self.session.world, self.quantizer
        inputs = quantizer.inputs(part, module, self.stream, self.layers)
        mine = world.mine(inputs, quantizer.effort, quantizer.owner)
        shares = world.gather(lambda: [quantizer.quantize(one, part) for one in mine])
        everything = Quantized({}, {})
        for rank, share in enumerate(shares):
            for found in share:
                everything.records.update(found.records)
                everything.tensors.update(found.tensors)
                if rank != world.rank:
                    self._take_over(part, found)
        return everything

    def _take_over(self, part: Part, found: Quantized) -> None:
        """Put what another process quantized into the part, and emit its records."""
        for name, record in found.records.items():
            if self.stream:
                linear = part.linears[name]
                linear.weight.copy_(dense_weight(found.tensors, self.session.recipe.scheme, name, linear))
            self.session.emit({"event": "layer", **record})

    def _read_back(self, part: Part, digests: Collection[str]) -> None:
        """Put the weights that an earlier run wrote into the part."""
        writer, scheme = self.session.writer, self.session.recipe.scheme
        path = writer.partial / writer.shard_name(part.index)
        wanted = {
            name: tensor_specs(scheme, linear.out_features, linear.in_features, name)
            for name, linear in part.linears.items()
        }
        stored = self.session.world.from_first(lambda: stored_tensors(path, wanted, digests))
        for name, linear in part.linears.items():
            linear.weight.copy_(dense_weight(stored, scheme, name, linear))

    def report(self, calibration: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
        """Return everything that was measured, as stored in the checkpoint.

        Args:
            calibration: description of the calibration windows; None without any.
            seconds: what the run took.
        """
        session = self.session
        return {
            "vllm_latq": vllm_latq.__version__,
            "torch": torch.__version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": base_model(session.decoder.source),
            "recipe": session.recipe.to_dict(),
            "run": session.writer.run,
            "calibration": calibration,
            "device": str(session.decoder.device.type),
            "seconds": round(seconds, 3),
            "peak_memory": peak_memory(),
            "totals": totals(self.layers),
            "layers": self.layers,
        }
