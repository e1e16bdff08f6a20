"""A decoder-only model, or an encoder, materialised one block at a time.

The model is built on the meta device; only what is at work holds memory.

    tokens -> embed() -> hidden states, block arguments -> block 0 -> block 1 -> ... -> head(): final norm, lm_head

What happens before the first and after the last block is transformers' own code: the blocks are replaced by recorders,
or by stand-ins that hand in the hidden states. Nothing is computed behind an encoder's blocks. Invariant: outside
`block(i)` and `head()` no weight is in memory.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_latq.errors import CheckpointError, LatqError, NumericalError, UnsupportedModelError, summary
from vllm_latq.format.reader import fingerprint_of, tensor_digest
from vllm_latq.models.stored_names import split_tensors, stored_names
from vllm_latq.quantize.machine.offload import Place
from vllm_latq.quantize.model.anatomy import Anatomy, fill_computed_buffers, initialized, is_linear, parts_outside
from vllm_latq.quantize.model.carried_state import Batch, HandedOn
from vllm_latq.quantize.model.meta_model import is_encoder, load_config, meta_model
from vllm_latq.quantize.model.model_store import ModelStore
from vllm_latq.quantize.model.recorder import Given, Recorder, check_recorded, record, shared
from vllm_latq.quantize.model.sources import check_sources, check_tied, tensor_sources


class Decoder:
    """The quantizer's view of a Hugging Face model directory.

    Args:
        source: model directory with config.json and safetensors.
        device: where blocks are computed.
        dtype: of the computation; None computes in float32 on a CPU and in the model's own dtype elsewhere.

    Raises:
        UnsupportedModelError: an architecture that is not understood, or a model that is quantized already, or a tensor
            of another shape than config.json makes it.
        CheckpointError: a tensor that is missing. No weight is read to find that out, only the files' headers.
    """

    def __init__(self, source: str | Path, device: str | torch.device, dtype: torch.dtype | None = None) -> None:
        self.source = Path(source)
        self.store = ModelStore(source)
        self.config = load_config(self.source)
        self.device = torch.device(device)
        own = self.config.dtype if isinstance(self.config.dtype, torch.dtype) else torch.bfloat16
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else own)
        self.model = meta_model(self.source, self.config, self.dtype)
        self.encoder = is_encoder(self.config)
        self.store.fit(self.model)
        self.anatomy = Anatomy.of(self.model, f"{source}: {type(self.model).__name__}", self.encoder)
        self.stored = stored_names(self.model, list(self.store.names()), str(source))
        embedding, table = self.model.get_input_embeddings().weight, f"{self.anatomy.embedding}.weight"
        tied = [f"{name}.weight" for name, head in self.head_linears.items() if head.weight is embedding]
        self.tied = bool(tied)
        self._outputs = 0
        self._digests: dict[str, str] = {}  # of each tensor that was read, by its name in the checkpoint
        self._sources = tensor_sources(self.model, self.stored, table, self.store)
        # Towers are copied as they are stored.
        split = {name for name in split_tensors(self.model) if self.anatomy.in_tower(name)}
        check_sources(self.model, {name: at for name, at in self._sources.items() if name not in split}, self.store)
        check_tied(tied, self.stored[table], self.store)

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def head_linears(self) -> dict[str, nn.Linear]:
        """Name in the checkpoint -> linear that makes logits; none for an encoder."""
        head = self.anatomy.head
        return {} if head is None else {self.stored_module(head): self.model.get_submodule(head)}

    def unties(self, quantized: Collection[str]) -> bool:
        """Return whether a head that is the embedding is one of its own once the linears named are quantized."""
        return self.tied and any(head in quantized for head in self.head_linears)

    @property
    def vocabulary(self) -> int:
        """Number of embeddings."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def block_name(self, index: int) -> str:
        """Name of a block in the checkpoint."""
        return f"{self.anatomy.blocks}.{index}"

    def linears(self, index: int) -> Mapping[str, nn.Linear]:
        """Name in the checkpoint -> linear of one block, in the block's own order."""
        modules = self._blocks[index].named_modules(prefix=self.block_name(index))
        return {self.stored_module(name): module for name, module in modules if is_linear(module)}

    def stored_module(self, name: str) -> str:
        """Name in the checkpoint of a module with a weight."""
        return self.stored[f"{name}.weight"].removesuffix(".weight")

    def stored_tensors(self, index: int) -> set[str]:
        """Names in the checkpoint of a block's tensors."""
        prefix = self.block_name(index) + "."
        return {
            part for name in self.stored if name.startswith(prefix) for part in self.store.stored(self.stored[name])
        }

    @property
    def known(self) -> set[str]:
        """Names in the checkpoint of the tensors of the language model, or of the encoder."""
        own = (name for name in self.stored if not self.anatomy.in_tower(name))
        return {part for name in own for part in self.store.stored(self.stored[name])}

    @property
    def longest(self) -> int | None:
        """Tokens in the longest sequence that it has positions for; None where that is not known."""
        limit = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        for module in self.model.modules() if self.encoder else ():
            if isinstance(module, nn.Embedding) and module.num_embeddings == limit and module.padding_idx is not None:
                # RoBERTa and its kin count positions from behind that of padding.
                limit -= module.padding_idx + 1
        return limit

    @torch.no_grad()
    def embed(self, samples: torch.Tensor, batch_size: int, place: Place = lambda hidden: hidden) -> list[Batch]:
        """Embed token ids int64 [n, tokens] and record what the model would pass to each of its blocks.

        `place` moves hidden states to where they wait.
        """
        batches: list[Batch] = []
        with self._outside(self.anatomy.head or self.anatomy.blocks):
            for tokens in samples.split(batch_size):
                recorders, argument = self._record(tokens.to(self.device))
                for recorder in recorders:
                    recorder.place_slices(place, tokens.shape)
                arguments = [recorder.arguments for recorder in recorders]
                if batches:
                    arguments = shared(arguments, batches[0].arguments)
                names = {name for recorder in recorders for name in recorder.mappings}
                hidden, handed_on = place(recorders[0].hidden.to("cpu")), HandedOn(names, argument, place)
                batches.append(Batch(hidden, arguments, handed_on))
        return batches

    def _record(self, tokens: torch.Tensor) -> tuple[list[Recorder], str]:
        """Arguments of each block, and the argument that the previous block returns beside hidden states."""
        base = self.model.get_submodule(self.anatomy.base)
        options = {} if self.encoder else {"use_cache": False}

        def run(recorders: list[Recorder]) -> bool:
            with self._replaced(recorders):
                states = getattr(base(tokens, **options), "last_hidden_state", None)
            return states is None or states.shape[:2] == tokens.shape

        recorders = record(self._blocks, self._outputs, run, f"{self.source}: {self.anatomy.blocks}")
        self._outputs = recorders[0].outputs
        return recorders, check_recorded(recorders, self.anatomy.blocks)

    @contextmanager
    def block(self, index: int) -> Iterator[nn.Module]:
        """The block with its weights in memory, for the time of the context."""
        block, name = self._blocks[index], self.block_name(index)
        try:
            for part, module in block.named_modules(prefix=name):
                self._materialize(part, module, {})
            yield block
        finally:
            block.to("meta")
            # Pages of a mapped file count as this process's memory until the file is closed.
            self.store.close()

    @contextmanager
    def head(self) -> Iterator[nn.Module]:
        """The modules that turn the last block's hidden states into logits, with their weights in memory."""
        # A tied embedding is in memory anyway, and Gemma 4 compares states with those of images' tokens.
        with self._outside(self.anatomy.blocks if self.tied else self.anatomy.embedding):
            yield _Tail(self)

    @torch.no_grad()
    def run(self, index: int, block: nn.Module, batch: Batch) -> torch.Tensor:
        """Output hidden states of a block for a batch, on the CPU."""
        output = self.forward(index, block, batch.hidden.to(self.device), batch).to("cpu")
        batch.handed_on.rest()
        return output

    def forward(self, index: int, block: nn.Module, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Output hidden states of a block for hidden states on its device, with the arguments of a batch."""
        try:
            output = block(hidden, **batch.handed_on.arguments(index, batch.arguments[index], self.device))
        except (AttributeError, LookupError, TypeError) as error:
            raise self._unable(self.block_name(index), "a block that takes text alone", error) from error
        return batch.handed_on.take(index, output)

    @property
    def _blocks(self) -> Any:
        return self.model.get_submodule(self.anatomy.blocks)

    @contextmanager
    def _replaced(self, blocks: list[Any]) -> Iterator[None]:
        """The model with other blocks, for the time of the context."""
        own = self._blocks
        self.model.set_submodule(self.anatomy.blocks, nn.ModuleList(blocks))
        try:
            yield
        finally:
            self.model.set_submodule(self.anatomy.blocks, own)

    @contextmanager
    def _outside(self, excluded: str) -> Iterator[None]:
        """Everything but blocks, towers and the module named, with its weights in memory."""
        parts = list(parts_outside(self.model, "", (excluded, self.anatomy.blocks, *self.anatomy.towers)))
        # Weights that a context around this one has in memory stay there.
        before = [(module, dict(module._parameters), dict(module._buffers)) for _, module in parts]
        loaded: dict[str, nn.Parameter] = {}
        try:
            for name, module in parts:
                self._materialize(name, module, loaded)
            yield
        finally:
            for module, parameters, buffers in before:
                module._parameters.update(parameters)
                module._buffers.update(buffers)

    def _materialize(self, name: str, module: nn.Module, loaded: dict[str, nn.Parameter]) -> None:
        """Give a module's own parameters and buffers, not those of its children, their values.

        `loaded` are the parameters in memory by their source, where one may stand for several.
        """
        fill_computed_buffers(self.model, name, module, self.device)
        prefix = f"{name}." if name else ""
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                source = self._sources[prefix + leaf]
                if source not in loaded:
                    values = self._load(prefix + leaf, parameter)
                    loaded[source] = initialized(nn.Parameter(values, requires_grad=False))
                module._parameters[leaf] = loaded[source]
        for leaf, buffer in module._buffers.items():
            if buffer is not None and leaf not in module._non_persistent_buffers_set:
                module._buffers[leaf] = initialized(self._load(prefix + leaf, buffer))

    def outside_tensors(self, *excluded: str) -> set[str]:
        """Names in the checkpoint of the model's tensors outside blocks, towers and the modules named."""
        excluded = (*excluded, self.anatomy.blocks, *self.anatomy.towers)
        tensors = self.model.state_dict(keep_vars=True)
        names = (
            f"{name}.{leaf}".removeprefix(".")
            for name, module in parts_outside(self.model, "", excluded)
            for leaf in (*module._parameters, *module._buffers)
        )
        return {part for name in names if name in tensors for part in self.store.stored(self._sources[name])}

    @property
    def embedding_tensors(self) -> set[str]:
        """Names in the checkpoint of the tensors that `embed` reads."""
        return self.outside_tensors(*filter(None, [self.anatomy.head]))

    def digest(self, names: Iterable[str]) -> str:
        """Return the SHA-256 of tensors of the checkpoint, as they were read; those not read before are read now."""
        return fingerprint_of(self._digests[name] if name in self._digests else self._noted(name)[1] for name in names)

    def fetch(self, stored: str) -> torch.Tensor:
        """Return a tensor of the checkpoint on the CPU, by its name there.

        Raises:
            CheckpointError: it is missing or damaged, or not what was read before under this name.
        """
        return self._noted(stored)[0]

    def _noted(self, stored: str) -> tuple[torch.Tensor, str]:
        """A tensor of the checkpoint, and its digest, which is noted."""
        tensor = self.store.get(stored)
        digest = tensor_digest(stored, tensor)
        if self._digests.setdefault(stored, digest) != digest:
            hint = "The model changed while it was read: remove OUT.partial and start over."
            raise CheckpointError(f"{self.source}: {stored}", "the tensor that was read before", "another", hint)
        return tensor, digest

    def read(self, stored: str) -> torch.Tensor:
        """A tensor of the checkpoint as `fetch`; NumericalError unless it is finite."""
        tensor = self.fetch(stored)
        if tensor.dtype.is_floating_point and tensor.element_size() < 2:
            hint = "Quantize the original model instead."
            raise UnsupportedModelError(
                f"{self.source}: {stored}", "weights in 16 bits or more", f"{tensor.dtype}", hint
            )
        # A single number may be a limit, as audio towers have them.
        wrong = tensor.isnan() if tensor.dim() == 0 else ~tensor.isfinite()
        if wrong.any():
            found = f"{int(wrong.sum())} NaN or infinite values"
            raise NumericalError(f"{self.source}: {stored}", "finite weights", found, "The model is damaged.")
        return tensor

    def _load(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Read a tensor of the model from its files, in the dtype of `like`, onto the device."""
        tensor = self.read(self._sources[name])
        if like.is_floating_point() and not tensor.is_floating_point():
            where = f"{self.source}: {self._sources[name]}"
            raise UnsupportedModelError(where, "floating-point numbers", f"{tensor.dtype}", "Is it quantized already?")
        return tensor.to(self.device, like.dtype, copy=True)

    def _unable(self, where: str, expected: str, error: Exception) -> UnsupportedModelError:
        """Turn an error of transformers' own code into one that names the place."""
        return UnsupportedModelError(f"{self.source}: {where}", expected, summary(error))


class _Tail(nn.Module):
    """Hidden states of the last block -> logits [n, tokens, vocabulary]."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        # In a tuple, or the whole model would become a submodule of this one.
        self.decoder = (decoder,)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        (decoder,) = self.decoder
        stand_ins = [Given(block, decoder._outputs) for block in decoder._blocks]
        for stand_in in stand_ins:
            stand_in.given = hidden
        with decoder._replaced(stand_ins):
            try:
                output = decoder.model(use_cache=False, **self._unused(hidden))
            except LatqError:
                raise
            except (AttributeError, TypeError, ValueError) as error:
                raise decoder._unable(decoder.anatomy.base, "a model that takes text alone", error) from error
        logits: torch.Tensor = output.logits
        return logits

    def _unused(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Inputs of the blocks only: embeddings of the tokens, and Gemma's further ones, one for each block.

        Nothing reads them, so the number of tokens need not be right, as where the streams of Gemma 3n come first.
        """
        (decoder,) = self.decoder
        width = decoder.model.get_input_embeddings().embedding_dim
        embeddings = {"inputs_embeds": hidden.new_zeros(*hidden.shape[:2], width)}
        size = getattr(decoder.config.get_text_config(), "hidden_size_per_layer_input", None)
        if size:
            embeddings["per_layer_inputs"] = hidden.new_zeros(*hidden.shape[:2], len(decoder), size)
        return embeddings
