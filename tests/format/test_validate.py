"""Every invariant of FORMAT.md section 3 has a violation here, which is refused with its own message."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from helpers.builders import gaussian_integers, packed_weight
from helpers.trellis import TRELLIS, random_trellis
from vllm_latq.coding.huffman import encoder as huffman
from vllm_latq.errors import CheckpointError, UnsupportedShapeError
from vllm_latq.format import validate
from vllm_latq.format.encodings.huffman import HuffmanWeight
from vllm_latq.format.encodings.packed import PackedWeight
from vllm_latq.format.encodings.registry import tensor_specs
from vllm_latq.format.scheme import LayerScheme

TRELLIS_SHAPE = (70, 140)
SHAPE = (9, 66)
PACKED = LayerScheme("packed", 3, 33, True)
HUFFMAN = LayerScheme("huffman")
Tensors = dict[str, torch.Tensor]


def trellis_tensors() -> Tensors:
    tensors = random_trellis(*TRELLIS_SHAPE).to_tensors()
    assert tensors["kept_positions"].numel() > 3
    return tensors


def packed_tensors() -> Tensors:
    return packed_weight(3, 33, *SHAPE, 0.2).to_tensors()


def huffman_tensors() -> Tensors:
    return HuffmanWeight(torch.tensor([0.01]), huffman.encode(gaussian_integers(SHAPE, 2.0, seed=1))).to_tensors()


def setting(name: str, index: object, value: object) -> Callable[[Tensors], None]:
    def damage(tensors: Tensors) -> None:
        changed = tensors[name].to(torch.int64) if not tensors[name].is_floating_point() else tensors[name].clone()
        changed[index] = value
        tensors[name] = changed.to(tensors[name].dtype)

    return damage


def dropping(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def replacing(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: function(tensors[name])})


def swap_first_columns(tensors: Tensors) -> None:
    columns = tensors["outlier_col_idx"].to(torch.int64)
    columns[[0, 1]] = columns[[1, 0]]
    tensors["outlier_col_idx"] = columns.to(torch.uint16)


def repeat_columns(tensors: Tensors) -> None:
    columns = tensors["outlier_col_idx"].to(torch.int64)
    columns[1:3] = columns[0]
    tensors["outlier_col_idx"] = columns.to(torch.uint16)


RISING = "layer.kept_positions: expected positions that rise strictly, found"
IN_RANGE = "layer.scale: expected a scale of 1.20370622e-35 to 8.30767497e+34 with every exponent, found"
TRELLIS_DAMAGE = [
    (dropping("kept_positions"), "layer.kept_positions: expected a tensor torch.int32 (*), found no such tensor"),
    (replacing("rates", lambda tensor: tensor.flatten()), "layer.rates: expected torch.uint8 (2, 2), found"),
    (replacing("row_exponents", lambda tensor: tensor[1:]), "layer.row_exponents: expected torch.int8 (70), found"),
    (replacing("column_importance", lambda tensor: tensor[1:]), "layer.column_importance: expected torch.int8 (140)"),
    (replacing("kept_values", lambda tensor: tensor.float()), "layer.kept_values: expected torch.bfloat16 (*), found"),
    (replacing("trellis", lambda tensor: tensor[None]), "layer.trellis: expected torch.int32 (*), found"),
    (setting("scale", 0, 0.0), "layer.scale: expected a finite, positive scale, found [0.0]"),
    (setting("scale", 0, float("nan")), "layer.scale: expected a finite, positive scale, found [nan]"),
    (setting("scale", 0, 2.0**115), IN_RANGE),
    (setting("scale", 0, 2.0**-115), IN_RANGE),
    (setting("rates", (1, 0), 1), "layer.rates: expected rates of 2 to 12 bits per step, found 1 to"),
    (setting("rates", (1, 0), 13), "layer.rates: expected rates of 2 to 12 bits per step, found"),
    (replacing("rates", lambda tensor: tensor.clamp(max=11) + 1), "words, which its rates take, found"),
    (replacing("trellis", lambda tensor: tensor[:-1]), "layer.trellis: expected"),
    (replacing("trellis", lambda tensor: tensor[:0]), "words, which its rates take, found 0"),
    (setting("kept_positions", 0, -1), "layer.kept_positions: expected positions in [0, 9800), found -1 to 9799"),
    (setting("kept_positions", -1, 9800), "layer.kept_positions: expected positions in [0, 9800), found 0 to 9800"),
    (replacing("kept_positions", lambda tensor: tensor.flip(0)), f"{RISING} "),
    (setting("kept_positions", 1, 0), f"{RISING} 1 mismatch, the first at entry 1"),
    (replacing("kept_values", lambda tensor: tensor[:-1]), "values, one per position, found"),
    (setting("kept_values", 1, float("nan")), "layer.kept_values: expected magnitudes below 1.70141e+38, found 1 mism"),
    (setting("kept_values", 2, -(2.0**127)), "magnitudes below 1.70141e+38, found 1 mismatch, the first at entry 2"),
]
PACKED_DAMAGE = [
    (dropping("scales"), "layer.scales: expected a tensor torch.bfloat16 (9, 2), found no such tensor"),
    (dropping("outlier_values"), "layer.outlier_values: expected a tensor"),
    (lambda tensors: tensors.update(extra=torch.zeros(1)), "layer.extra: expected only"),
    (replacing("qweight", lambda tensor: tensor[:, :-1]), "layer.qweight: expected torch.int32 (9, 7), found"),
    (replacing("qweight", lambda tensor: tensor.to(torch.int64)), "layer.qweight: expected torch.int32"),
    (replacing("scales", lambda tensor: tensor.float()), "layer.scales: expected torch.bfloat16"),
    (setting("weight_shape", 0, 10), "layer.weight_shape: expected the shape of the linear"),
    (
        setting("scales", (0, 0), float("nan")),
        "layer.scales: expected scales that are not zero, and finite also times 4, found 1 mismatch",
    ),
    (setting("scales", ([8, 2], [0, 1]), 0.0), "finite also times 4, found 2 mismatches, the first at row 2, group 1"),
    (setting("scales", (2, 0), 3e38), "and finite also times 4, found 1 mismatch, the first at row 2, group 0"),
    (
        replacing("qweight", lambda tensor: tensor ^ 1),
        "layer.qweight: expected the zero code, 4, under every outlier, found code 5 at row 0, column 32",
    ),
    (
        setting("qweight", ([7, 3], -1), -1),
        "zero bits after the last code of each row, found 2 mismatches, the first at row 3",
    ),
    (setting("outlier_row_ptr", 0, 1), "layer.outlier_row_ptr: expected 0 first"),
    (setting("outlier_row_ptr", -1, 10**6), "layer.outlier_row_ptr: expected 0 first and"),
    (setting("outlier_row_ptr", 4, -7), "layer.outlier_row_ptr: expected offsets that never fall, found a fall after"),
    (setting("outlier_col_idx", 0, 66), "layer.outlier_col_idx: expected columns in [0, 66)"),
    (swap_first_columns, "columns that rise strictly within a row, found 1 mismatch, the first at entry 1"),
    (repeat_columns, "columns that rise strictly within a row, found 2 mismatches, the first at entry 1"),
    (
        setting("outlier_values", 0, float("inf")),
        "layer.outlier_values: expected values that are finite, found 1 mismatch, the first at entry 0",
    ),
    (replacing("outlier_values", lambda tensor: tensor[:-1]), "layer.outlier_values: expected as many values"),
]
HUFFMAN_DAMAGE = [
    (dropping("stream"), "layer.stream: expected a tensor"),
    (setting("scale", 0, float("inf")), "layer.scale: expected a finite, positive scale"),
    (setting("code_lengths", slice(None), 0), "layer.code_lengths: expected 1 to 4097 code lengths"),
    (setting("code_lengths", 0, 16), "layer.code_lengths: expected 1 to 4097 code lengths of at most 15 bits"),
    (replacing("code_lengths", lambda tensor: tensor[:0]), "layer.code_lengths: expected 1 to 4097"),
    (setting("code_lengths", 0, 1), "layer.code_lengths: expected a complete prefix code (Kraft sum 1)"),
    (setting("chunk_bits", (0, 0), 65535), "layer.chunk_bits: expected chunks that fill the stream"),
    (replacing("stream", lambda tensor: tensor[:-1]), "layer.chunk_bits: expected chunks that fill the stream"),
    (setting("first_symbol", 0, 2**31 - 1), "layer.first_symbol: expected symbols that fit int32"),
    (setting("stream", -1, -1), "layer.stream: expected zero bits after the last chunk"),
    (
        lambda tensors: tensors.update(
            chunk_bits=torch.zeros_like(tensors["chunk_bits"]), stream=tensors["stream"][:0]
        ),
        "layer.chunk_bits: expected at least one bit for each weight",
    ),
    (replacing("chunk_bits", lambda tensor: tensor.reshape(-1)[:1]), "layer.chunk_bits: expected torch.uint16 (1, 1)"),
]


def test_undamaged_tensors_have_no_problems() -> None:
    assert list(validate.problems(trellis_tensors(), TRELLIS, TRELLIS_SHAPE, "layer")) == []
    assert list(validate.problems(packed_tensors(), PACKED, SHAPE, "layer")) == []
    assert list(validate.problems(huffman_tensors(), HUFFMAN, SHAPE, "layer")) == []


KINDS: dict[str, Any] = {
    "trellis": (trellis_tensors, TRELLIS, TRELLIS_SHAPE, TRELLIS_DAMAGE),
    "packed": (packed_tensors, PACKED, SHAPE, PACKED_DAMAGE),
    "huffman": (huffman_tensors, HUFFMAN, SHAPE, HUFFMAN_DAMAGE),
}


CASES = [
    pytest.param(kind, damage, message, id=f"{kind}, {message[:50]}")
    for kind, (*_, damages) in KINDS.items()
    for damage, message in damages
]


@pytest.mark.parametrize(("kind", "damage", "message"), CASES)
def test_each_violation_has_its_message(kind: str, damage: Callable[[Tensors], None], message: str) -> None:
    make, scheme, shape, _ = KINDS[kind]
    tensors = make()
    damage(tensors)
    with pytest.raises(CheckpointError) as caught:
        validate.check(tensors, scheme, shape, "layer")
    assert message in str(caught.value)


@pytest.mark.parametrize(("scale", "refused"), [(2e36, False), (3e36, True), (-3e36, False)])
@pytest.mark.parametrize("grid", ["midrise", "midtread"])
def test_midrise_half_step_counts_for_the_range_of_outliers(scale: float, refused: bool, grid: str) -> None:
    """The sum is in float32: in bfloat16, half of 2e36 would already make the largest number infinite."""
    tensors, scheme = packed_tensors(), dataclasses.replace(PACKED, grid=grid)
    row = int((tensors["outlier_row_ptr"] <= 2).sum()) - 1
    column = int(tensors["outlier_col_idx"][2])
    tensors["outlier_values"][2] = torch.finfo(torch.bfloat16).max
    tensors["scales"][row, column // 33] = scale
    found = [str(problem).split(". ")[0] for problem in validate.problems(tensors, scheme, SHAPE, "layer")]
    expected = "layer.outlier_values: expected values that are finite also with half a scale added"
    largest = f"{torch.finfo(torch.bfloat16).max:g}"
    assert found == [f"{expected}, found {largest} at row {row}, column {column}"] * (refused and grid == "midrise")


def test_bad_scale_is_the_only_problem_reported() -> None:
    tensors, scheme = packed_tensors(), PACKED
    tensors["scales"][:, :] = float("nan")
    for grid in ("midtread", "midrise"):
        scheme = dataclasses.replace(scheme, grid=grid)
        (problem,) = validate.problems(tensors, scheme, SHAPE, "layer")
        assert "layer.scales: expected" in str(problem)


def test_trellis_whose_positions_would_not_fit_in_int32() -> None:
    shape = (65536, 32769)
    with pytest.raises(UnsupportedShapeError, match="layer: expected at most 2147483648 weights, found 65536 x 32769"):
        validate.check(trellis_tensors(), TRELLIS, shape, "layer")
    assert list(tensor_specs(TRELLIS, 65536, 32768)) == list(trellis_tensors())


@pytest.mark.parametrize("sign", [-1, 1])
def test_largest_trellis_weights_are_finite(sign: int) -> None:
    tensors = trellis_tensors()
    tensors["scale"][0] = 2.0**113
    tensors["kept_values"][:] = sign * torch.nextafter(torch.tensor(2.0**127), torch.tensor(0.0)).bfloat16().mul(0.996)
    weight = validate.weight_from_tensors(tensors, TRELLIS, TRELLIS_SHAPE, "layer")
    assert torch.isfinite(weight.dequantize(torch.bfloat16)).all()


def test_columns_that_do_not_fit_in_16_bits() -> None:
    """Such columns are stored as int32, which can be negative."""
    shape, scheme = (1, 70000), LayerScheme("packed", 2, -1, True)
    integers, mask = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.bool)
    mask[0, [3, 69999]] = True
    scales = torch.ones((1, 1), dtype=torch.bfloat16)
    tensors = PackedWeight.from_integers(integers, scales, 2, -1, mask, torch.ones(shape)).to_tensors()
    assert list(validate.problems(tensors, scheme, shape, "layer")) == []
    tensors["outlier_col_idx"][0] = -3
    (problem,) = validate.problems(tensors, scheme, shape, "layer")
    assert "layer.outlier_col_idx: expected columns in [0, 70000), found -3 to 69999" in str(problem)


def test_chunk_of_another_length_is_refused_when_decoded() -> None:
    integers = gaussian_integers((40, 300), 2.0, seed=1)
    tensors = HuffmanWeight(torch.tensor([0.01]), huffman.encode(integers)).to_tensors()
    bits = tensors["chunk_bits"].to(torch.int32)
    bits[0, 0], bits[1, 0] = bits[0, 0] + 1, bits[1, 0] - 1
    tensors["chunk_bits"] = bits.to(torch.uint16)
    weight = validate.weight_from_tensors(tensors, HUFFMAN, (40, 300), "layer")
    with pytest.raises(CheckpointError, match=r"layer\.stream: expected chunk 0 to end at bit \d+, found bit"):
        weight.decode("layer")


@pytest.mark.parametrize(("octaves", "refused"), [(123.9, False), (124.1, True)])
def test_weights_that_could_be_infinite_are_refused_when_decoded(octaves: float, refused: bool) -> None:
    """The largest integer is -8: a scale below 2^124 keeps all weights below 2^127."""
    integers = torch.tensor([[3, -8, 0, 7]], dtype=torch.int32)
    weight = HuffmanWeight(torch.tensor([2.0**octaves]), huffman.encode(integers))
    validate.check(weight.to_tensors(), weight.scheme, (1, 4), "layer")
    if refused:
        with pytest.raises(CheckpointError, match=r"layer\.scale: expected a scale whose largest multiple"):
            weight.decode("layer")
    else:
        assert torch.equal(weight.decode("layer"), integers)
        assert torch.isfinite(weight.dequantize(torch.bfloat16)).all()
