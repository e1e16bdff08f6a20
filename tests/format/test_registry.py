"""A new encoding is one class and one line of the registry: every step from config to served weight then knows it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
import torch

from helpers import checkpoints
from helpers.checkpoints import SHAPES, write_tiny_checkpoint
from vllm_latq.cli.inspect import inspect_checkpoint
from vllm_latq.cli.report_page import ReportPage
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.encodings.packed import PackedWeight, pack_integers
from vllm_latq.format.encodings.registry import ENCODINGS, tensor_specs, tensor_suffixes
from vllm_latq.format.encodings.weight import Decoder, IntegerWeight
from vllm_latq.format.problems import problem
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.format.tensors import TensorSpec
from vllm_latq.format.validate import weight_from_tensors
from vllm_latq.format.verify import verify
from vllm_latq.integrations.vllm.dummy import dummy_weight
from vllm_latq.serving.merging import decode, merge, read_shard

TOY = LayerScheme("toy")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class ToyWeight(IntegerWeight):
    """Integers from -128 to 127, one byte each, on one scale; -128 is not allowed."""

    coded = True
    full_scheme = TOY
    scheme = TOY

    scale: torch.Tensor
    toys: torch.Tensor

    @classmethod
    def check_scheme(cls, scheme: LayerScheme) -> None:
        if scheme != TOY:
            raise ConfigError("scheme", "nothing but the encoding", str(scheme))

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.toys.shape
        return rows, cols

    def integers(self) -> torch.Tensor:
        return self.toys.to(torch.int32)

    def decode(self, where: str, decoder: Decoder | None = None) -> torch.Tensor:
        return self.integers()

    def pack(self, integers: torch.Tensor | None = None, bits: int | None = None) -> PackedWeight:
        return pack_integers(self.integers(), self.scale.expand(len(self.toys)), bits)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self.toys * self.scale).to(dtype)

    def served_bits(self) -> int:
        return self.pack().served_bits()

    def outlier_counts(self) -> torch.Tensor:
        return torch.zeros(len(self.toys), dtype=torch.int64)

    def encoded(self) -> dict[str, torch.Tensor]:
        return {"scale": self.scale, "toys": self.toys}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int]) -> Self:
        return cls(tensors["scale"], tensors["toys"])

    @staticmethod
    def specs(scheme: LayerScheme, rows: int, cols: int, where: str) -> dict[str, TensorSpec]:
        return {"scale": TensorSpec(torch.float32, (1,)), "toys": TensorSpec(torch.int8, (rows, cols))}

    @staticmethod
    def problems(
        tensors: Mapping[str, torch.Tensor], scheme: LayerScheme, shape: tuple[int, int], where: str
    ) -> Iterator[CheckpointError]:
        if (tensors["toys"] == -128).any():
            yield problem(f"{where}.toys", "integers above -128", "-128")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODINGS, "toy", ToyWeight)


def toy_weight(rows: int, cols: int, seed: int = 0) -> ToyWeight:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randint(-9, 10, (rows, cols), generator=generator).to(torch.int8)
    return ToyWeight(torch.tensor([0.5]), z)


def test_config_knows_the_encoding() -> None:
    config = CheckpointConfig(TOY)
    assert CheckpointConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match="expected nothing but the encoding"):
        CheckpointConfig.from_dict({**config.to_dict(), "bits": 4})


def test_specs_and_suffixes_know_the_encoding() -> None:
    specs = tensor_specs(TOY, 3, 5)
    assert list(specs) == ["weight_shape", "scale", "toys"]
    assert specs["toys"].shape == (3, 5)
    assert "toys" in tensor_suffixes()


def test_tensors_are_validated_and_wrapped() -> None:
    weight = toy_weight(3, 5)
    tensors = weight.to_tensors()
    again = weight_from_tensors(tensors, TOY, (3, 5), "layer")
    assert torch.equal(again.dequantize(), weight.toys.float() * 0.5)
    assert again.storage_bits() == 8 * (8 + 4 + 15)
    tensors["toys"] = tensors["toys"].clone().fill_(-128)
    with pytest.raises(CheckpointError, match=r"layer\.toys: expected integers above -128, found -128"):
        weight_from_tensors(tensors, TOY, (3, 5), "layer")


def test_shards_are_decoded_and_merged() -> None:
    shards = [(name, toy_weight(rows, 64, rows)) for name, rows in (("gate", 24), ("up", 40))]
    read = [(name, read_shard(weight.to_tensors(), TOY, 64, name)) for name, weight in shards]
    merged = merge(read, decode(read, CPU), CPU)
    assert torch.equal(merged.dequantize(), torch.cat([weight.dequantize() for _, weight in shards]))


def test_dummy_weights_have_the_layout_of_a_decoded_one() -> None:
    dummy = dummy_weight(TOY, 16, 64, {})
    served = toy_weight(16, 64).pack(bits=dummy.bits)
    assert dummy.qweight.shape == served.qweight.shape
    assert (dummy.scales, served.scales) == (None, None)
    assert dummy.row_scales is not None
    assert dummy.outliers is not None


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(checkpoints.SCHEMES, "toy", TOY)
    monkeypatch.setattr(checkpoints, "tiny_weight", lambda scheme, shape, seed: toy_weight(*shape, seed))
    return write_tiny_checkpoint(tmp_path / "toy", "toy")


def test_a_checkpoint_is_verified_and_described(checkpoint: Path) -> None:
    assert list(verify(checkpoint)) == []
    layers = inspect_checkpoint(checkpoint)["layers"]
    assert [(layer["encoding"], layer["outlier_density"]) for layer in layers] == [("toy", 0.0)] * len(SHAPES)
    assert f"<td>{layers[0]['name']}<td>" in ReportPage(checkpoint).render().replace("<wbr>", "")


def test_a_reader_without_the_encoding_refuses_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ENCODINGS, "toy")
    (problem,) = verify(checkpoint)
    assert "encoding: expected one of packed, huffman, trellis, found 'toy'" in str(problem)
