"""With VLLM_BATCH_INVARIANT=1 the kernels' result of a row is bitwise the same for any number of rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.builders import packed_weight
from helpers.kernel_device import DEVICE
from helpers.mixtures import Mixture, routing
from helpers.stacks import stack_of_experts
from vllm_latq.format.encodings.packed import pack_integers
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.kernels.configs import INVARIANT_ROWS, decode_config
from vllm_latq.kernels.decode import dispatch
from vllm_latq.kernels.decode.dispatch import allocate_scratch, ssqr_matmul
from vllm_latq.kernels.experts import grouped
from vllm_latq.kernels.experts.routing import batch_size
from vllm_latq.serving.layouts.tiled import TiledOperands
from vllm_latq.serving.linear import linear
from vllm_latq.serving.operands import make_operands

pytestmark = pytest.mark.kernel

ROWS = (1, 3, 8, 16)
MANY = 2 * INVARIANT_ROWS + 1


@pytest.fixture(autouse=True)
def _batch_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


def integers_beyond_the_grid() -> Any:
    integers = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).mul(3).round().to(torch.int32)
    return pack_integers(integers, torch.linspace(0.1, 1, 40), 2)


@pytest.mark.parametrize(
    "weight",
    [
        packed_weight(3, 128, 70, 2048, 0.02),
        packed_weight(8, 32, 64, 96, None),
        packed_weight(4, -1, 33, 500, 0.03, midrise=True),
        integers_beyond_the_grid(),
    ],
    ids=["3-bit", "8-bit", "4-bit row", "integers"],
)
def test_row_does_not_depend_on_the_number_of_rows(weight: Any) -> None:
    made = make_operands(weight.to(DEVICE), torch.bfloat16, "layer")
    assert isinstance(made, TiledOperands)
    made = TiledOperands(replace(made.weight, processors=132))  # so that columns are cut into parts
    arguments = (made.tensors().values(), made.constants(), made.layout, made.arch)
    x = torch.randn(MANY, weight.cols, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    expected = linear(x, *arguments)
    reference = x.cpu().double() @ weight.dequantize().double().t()
    assert (expected.cpu() - reference).abs().max() <= 2**-7 * reference.abs().max(), "bfloat16 has 8 bits"
    for rows in ROWS:
        assert torch.equal(linear(x[:rows], *arguments), expected[:rows])
    assert torch.equal(linear(x[21:24], *arguments), expected[21:24])


def test_token_of_experts_does_not_depend_on_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tokens change the rows and the batches of an expert, but not a batch's size nor how columns are cut."""
    cuts = set()

    def record(*arguments: Any) -> Any:
        scratch = allocate_scratch(*arguments)
        cuts.add((arguments[1].rows, arguments[3], scratch.parts, scratch.ranges))
        return scratch

    monkeypatch.setattr(grouped, "allocate_scratch", record)
    mixture = Mixture(LayerScheme("packed", 3, 32, True), torch.float16, device=DEVICE)
    x, weights, ids = (part.to(DEVICE) for part in routing(MANY, 2))
    x = (x * 0.01).half()
    expected = mixture(x, weights, ids)
    for first, end in ((0, 1), (1, 9), (MANY - 1, MANY)):
        assert torch.equal(mixture(x[first:end], weights[first:end], ids[first:end]), expected[first:end])
    assert len(cuts) == 2, "one for each product"


def test_launches_are_the_same_for_all_numbers_of_rows(make_layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One configuration and one cut of the columns, and no dense weights."""
    weight = replace(make_layer(3, 4096, 4096).weight, arch="sm_90", processors=132, invariant=True)
    found = []
    monkeypatch.setattr(dispatch, "launch_ssqr", lambda x, *rest: found.append((len(x), *rest[2:])))
    for rows in (1, 2, 16, 40, 300):
        ssqr_matmul(torch.zeros(rows, 4096, dtype=torch.bfloat16, device=DEVICE), weight)
    assert {(config, scratch.parts, scratch.ranges, m) for _, config, scratch, m in found} == {
        (decode_config(INVARIANT_ROWS, 3, "sm_90", 128), found[0][2].parts, 1, INVARIANT_ROWS)
    }
    assert [rows for rows, *_ in found] == [1, 2, 16, 16, 16, 8, *[16] * 18, 12]


def test_cut_and_size_of_batches_depend_on_no_number_of_tokens() -> None:
    stack = replace(stack_of_experts(16), invariant=True, processors=132)
    assert {batch_size(tokens, 2, 16, [stack, stack]) for tokens in (1, 2, 300, 100_000)} == {INVARIANT_ROWS}
    x, config = torch.zeros(1, 64, dtype=torch.float16, device=DEVICE), decode_config(INVARIANT_ROWS, 3, "sm_90")
    wide = replace(stack, words=stack.words.expand(-1, -1, 64, -1, -1, -1), arch="sm_90")
    cuts = {allocate_scratch(x, wide, config, INVARIANT_ROWS, batches, 2).parts for batches in (2, 30, 400)}
    assert len(cuts) == 1
    assert cuts != {allocate_scratch(x, wide, config, INVARIANT_ROWS, 400).parts}
