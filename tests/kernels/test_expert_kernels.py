"""Experts through the kernels, in the interpreter: each way to multiply gives the dense experts' sum."""

import pytest
import torch
from mixtures import EXPERTS, Mixture, routing
from random_weights import RANS

from vllm_latq import expert_op
from vllm_latq.config import LayerScheme

pytestmark = pytest.mark.interpreter

# Of the largest output: x, the gated product and the output are each rounded to float16 (2^-11), one after the other.
TOLERANCE = 2**-8
SCHEMES = {
    "packed3": LayerScheme("packed", 3, 32, True, grid="midrise"),
    "packed4-row": LayerScheme("packed", 4, -1, False),
    "rans": RANS,
}


@pytest.mark.parametrize(
    ("scheme", "way"), [*((name, "by_expert") for name in SCHEMES), ("packed3", "by_pair"), ("packed3", "by_all")]
)
def test_equals_dense_experts(scheme: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two are what a CUDA graph captures: one gathers its operands, the other takes views of their stack."""
    mixture = Mixture(SCHEMES[scheme], torch.float16)
    assert mixture.constants[2] == ["ssqr_tiled", "ssqr_tiled"]
    x, weights, ids = routing(3, 2)
    x *= 0.01  # float16 overflows at 65504
    monkeypatch.setattr(expert_op, "by_expert", getattr(expert_op, way))
    expected = mixture.reference(x, weights, ids)
    got = mixture(x.half(), weights, ids).float()
    assert (got - expected).abs().max() <= TOLERANCE * expected.abs().max()
    if scheme == "packed3":
        for stacks in mixture.stacks:  # the last one holds the kernels' tickets, which count within a launch
            assert stacks[-1].shape[0] == EXPERTS
            assert not stacks[-1].any()
