"""FORMAT.md is enough to read a checkpoint: `format_reader`, written from its text alone, reads the same weights as the
package, and computes the same fingerprint.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from helpers.builders import tiny_weight
from helpers.checkpoints import SCHEMES, write_tiny_checkpoint
from helpers.format_reader import fingerprint, matrices, matrix, read_file
from helpers.trellis import random_trellis
from vllm_latq.coding.trellis.code import RATES
from vllm_latq.format import validate
from vllm_latq.format.encodings.trellis import TrellisWeight
from vllm_latq.format.reader import CheckpointReader, checkpoint_fingerprint
from vllm_latq.format.scheme import LayerScheme

# Several chunks of rows, or of columns; whole words, and codes that straddle them.
SHAPES = [(700, 8), (2, 2056), (3, 4200), (1, 1)]
SCHEMES_OF_LINEARS = [
    LayerScheme("huffman"),
    *(
        LayerScheme("packed", bits, group_size, outliers, grid)
        for bits in (2, 3, 4, 8)
        for group_size in (1, -1)
        for outliers in (False, True)
        for grid in ("midtread", "midrise")
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES_OF_LINEARS, ids=lambda scheme: "-".join(map(str, scheme.to_dict().values())))
def test_linear_reads_as_the_format_says(scheme: LayerScheme, shape: tuple[int, int], tmp_path: Path) -> None:
    weight = tiny_weight(scheme, shape, 0)
    save_file(weight.to_tensors(), tmp_path / "linear.safetensors")
    found = matrix(read_file(tmp_path / "linear.safetensors"), scheme.to_dict())
    assert found.dtype == np.float32
    assert np.array_equal(found, weight.dequantize().numpy())


def test_column_indices_of_32_bits(tmp_path: Path) -> None:
    test_linear_reads_as_the_format_says(LayerScheme("packed", 2, -1, True), (1, 65600), tmp_path)


@pytest.mark.parametrize("changes", [{"grid": "midtread"}, {"outliers": None}, {"ignore": None}])
def test_fingerprint_ignores_defaults_that_are_spelled_out(changes: dict[str, Any], tmp_path: Path) -> None:
    """A config may leave out defaults, or spell them out."""
    directory = write_tiny_checkpoint(tmp_path / "packed", "packed")
    config = json.loads((directory / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization["overrides"] = {"layers.1.up": {"encoding": "packed", "bits": 4, "group_size": 3, "outliers": False}}
    for scheme in (quantization, quantization["overrides"]["layers.1.up"]):
        scheme.update(changes)
        for key in [key for key, value in scheme.items() if value is None]:
            del scheme[key]
    (directory / "config.json").write_text(json.dumps(config))
    check(directory)


@pytest.mark.parametrize("encoding", SCHEMES)
def test_tiny_checkpoint_reads_as_the_format_says(encoding: str, tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path / encoding, encoding)
    check(directory)


# Whole tiles and units, and such that the end of the matrix cuts off; several parts of columns; one row; one column.
TRELLIS_SHAPES = [(1, 1), (1, 33), (40, 1), (16, 16), (64, 128), (65, 129), (130, 300), (3, 512), (17, 1024), (2, 2048)]


@pytest.mark.parametrize("shape", TRELLIS_SHAPES, ids=str)
@pytest.mark.parametrize("kept", [0.0, 0.05, 1.0])
def test_trellis_reads_as_the_format_says(shape: tuple[int, int], kept: float, tmp_path: Path) -> None:
    check_linear(random_trellis(*shape, kept=kept), tmp_path)


@pytest.mark.parametrize("rate", RATES)
def test_each_rate_reads_as_the_format_says(rate: int, tmp_path: Path) -> None:
    check_linear(random_trellis(33, 50, rate, rates=(rate,)), tmp_path)


@pytest.mark.parametrize(("scale", "low", "high"), [(2.0**-84, -128, -120), (2.0**84, 120, 127), (1.0, -128, 127)])
def test_extreme_exponents_read_as_the_format_says(scale: float, low: int, high: int, tmp_path: Path) -> None:
    weight = random_trellis(20, 40)
    rows, columns = (torch.arange(size).remainder(high - low + 1).add(low).to(torch.int8) for size in weight.shape)
    rows[-1] = columns[-1] = high
    weight = replace(weight, scale=torch.tensor([scale]), row_exponents=rows, column_exponents=columns)
    check_linear(weight, tmp_path)
    assert torch.isfinite(weight.dequantize(torch.bfloat16)).all()


def test_example_of_the_format() -> None:
    words = torch.tensor([0x12345678, *[0] * 14, 0x9ABCDEF0 - 2**32], dtype=torch.int32)
    row_exponents, columns, importance = (
        torch.tensor(values, dtype=torch.int8) for values in ([8], [0, -8, 4], [1, 5, 1])
    )
    rates = torch.tensor([[4]], dtype=torch.uint8)
    kept = torch.tensor([2], dtype=torch.int32), torch.tensor([0.25], dtype=torch.bfloat16)
    weight = TrellisWeight(torch.tensor([0.5]), row_exponents, columns, importance, rates, words, *kept)
    found = weight.dequantize()[0].tolist()
    assert found == [-0.9459071159362793, 0.27381521463394165, 2.9817540645599365]
    text = (Path(__file__).parents[2] / "FORMAT.md").read_text()
    assert all(str(value) in text for value in found)


def check_linear(weight: TrellisWeight, directory: Path) -> None:
    validate.check(weight.to_tensors(), weight.scheme, weight.shape, "layer")
    save_file(weight.to_tensors(), directory / "linear.safetensors")
    found = matrix(read_file(directory / "linear.safetensors"), weight.scheme.to_dict())
    assert found.dtype == np.float32
    assert np.array_equal(found, weight.dequantize().numpy())


def test_quantized_models_read_as_the_format_says(ssqr_checkpoint: Path, mixed_pair: tuple[Path, Path]) -> None:
    check(ssqr_checkpoint)
    check(mixed_pair[0])


def check(directory: Path) -> None:
    reader = CheckpointReader(directory)
    found = matrices(directory)
    assert found.keys() == reader.shapes.keys()
    for name, weights in found.items():
        assert np.array_equal(weights, reader.weight(name).dequantize().numpy()), name
    assert fingerprint(directory) == checkpoint_fingerprint(reader)
