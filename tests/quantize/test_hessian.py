"""Hessians: the sums of the inputs that were seen, to the last digits of float32 whatever the inputs' dtype."""

import pytest
import torch

from vllm_latq.quantize.hessian import InputHessian

# 999 products of up to about 10 are added in float32.
RELATIVE_TOLERANCE = 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gram_is_that_of_the_inputs_in_float32(dtype):
    inputs = torch.randn(3, 333, 65, generator=torch.Generator().manual_seed(0)).to(dtype)
    hessian = InputHessian(["layer"], torch.zeros(65, 65))
    before = torch.get_float32_matmul_precision()
    for part in inputs:
        hessian.add(part)
    rows = inputs.flatten(0, 1).double()
    assert hessian.tokens == 999
    assert hessian.matrix.dtype == torch.float32
    assert (hessian.matrix.double() - rows.T @ rows).abs().max() < RELATIVE_TOLERANCE * 999
    assert torch.get_float32_matmul_precision() == before
