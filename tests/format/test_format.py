"""FORMAT.md is enough to read a checkpoint: `format_reader`, written from its text alone, reads the same weights as the
package, and computes the same fingerprint.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

from helpers.builders import tiny_weight
from helpers.checkpoints import SCHEMES, write_tiny_checkpoint
from helpers.format_reader import fingerprint, matrices, matrix, read_file
from vllm_latq.format.reader import CheckpointReader, checkpoint_fingerprint
from vllm_latq.format.scheme import LayerScheme

# Several chunks of rows, or of columns; whole words, and codes that straddle them.
SHAPES = [(700, 8), (2, 2056), (3, 4200), (1, 1)]
PACKED = [
    LayerScheme("packed", bits, group_size, outliers, grid)
    for bits in (2, 3, 4, 8)
    for group_size in (1, -1)
    for outliers in (False, True)
    for grid in ("midtread", "midrise")
]
CODED = [LayerScheme("huffman"), LayerScheme("rans"), LayerScheme("rans", grid="midrise")]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", [*PACKED, *CODED], ids=lambda scheme: "-".join(map(str, scheme.to_dict().values())))
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
