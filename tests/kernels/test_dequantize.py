"""Prefill: dense chunks exactly, and the whole product."""

import pytest
import torch

from helpers.kernel_device import DEVICE
from vllm_latq.kernels.decode import prefill as module
from vllm_latq.kernels.decode.dispatch import ssqr_matmul
from vllm_latq.kernels.decode.prefill import dequantize, launch_dequantize, prefill_matmul
from vllm_latq.kernels.dev.reference import matmul_reference
from vllm_latq.kernels.layout.outliers import OutlierCsr
from vllm_latq.kernels.layout.weight import KernelWeight, prepare

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("cols", "group_size"), [(512, 128), (96, 32), (320, 64), (500, -1)])
def test_dense_weights_exactly(make_layer, bits: int, cols: int, group_size: int) -> None:
    """bf16 scales times small integers, and bf16 outliers, are exact in float32."""
    midrise = cols in (96, 500)
    outliers = {} if midrise else {"outliers": 0.03, "full_rows": (129,)}
    layer = make_layer(bits, 130, cols, group_size=group_size, midrise=midrise, **({"outliers": 0.0} | outliers))
    w = torch.full((130, cols), float("nan"), device=DEVICE)
    launch_dequantize(layer.weight, w, 0, 4)
    assert torch.equal(w.cpu().double(), layer.dense)


def test_a_chunk_of_rows(make_layer) -> None:
    layer = make_layer(3, 200, 256, outliers=0.05)
    w = torch.full((72, 256), float("nan"), device=DEVICE)
    launch_dequantize(layer.weight, w, 2, 2)
    assert torch.equal(w.cpu().double(), layer.dense[128:])


@pytest.mark.parametrize("rows", [40, 170])
def test_rows_in_the_other_block(make_layer, rows: int) -> None:
    """Some of the last 128 rows are in the second block, although one block would hold all of them."""
    layer = make_layer(3, rows, 96, group_size=32, outliers=0.03)
    assert torch.equal(dequantize(layer.weight, torch.float32).cpu().double(), layer.dense)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_row_scales(make_layer, bits: int) -> None:
    """Integers, and outliers beyond their grid, some of them far."""
    options = {"group_size": -1, "scales": False, "row_scales": True, "outliers": 0.05}
    layer = make_layer(bits, 65, 700, **options, full_rows=(64,))
    w = dequantize(layer.weight, torch.float32).cpu().double()
    assert torch.allclose(w, layer.dense, rtol=2**-23, atol=0)


def test_integers_beyond_the_grid_are_rounded_once(make_layer) -> None:
    layer = make_layer(3, 70, 300, group_size=-1, scales=False, row_scales=True, outliers=0.2)
    assert torch.equal(dequantize(layer.weight, torch.float16).cpu(), layer.dense.float().half())


def test_overflowing_integers_are_put_together_again() -> None:
    """An integer with more than 8 significant bits takes two or three entries of one place."""
    row_ptr = torch.tensor([0, 2, 4], dtype=torch.int32)
    col_idx, values = torch.tensor([0, 5, 5, 6]), torch.tensor([1001.0, 65537.0, -11184811.0, 12345.0])
    qweight, *csr = (
        part.to(DEVICE) for part in (torch.full((2, 2), -2139062144, dtype=torch.int32), row_ptr, col_idx, values)
    )
    weight = prepare(qweight, 8, -1, 8, None, None, OutlierCsr(*csr))
    dense = torch.zeros(2, 8)
    dense[[0, 0, 1, 1], col_idx] = values
    assert torch.equal(dequantize(weight, torch.float32).cpu(), dense)


@pytest.mark.parametrize("m", [129, 140])
def test_prefill_in_chunks(make_layer, monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    layer = make_layer(3, 130, 256)
    x = torch.randn(m, 256).half()
    expected = matmul_reference(x, layer.dense)
    monkeypatch.setattr(module, "CHUNK_BYTES", 128 * 256 * 2)  # two row blocks at a time
    launch = module.launch_dequantize

    def bounded(weight: KernelWeight, w: torch.Tensor, first_block: int, blocks: int) -> None:
        assert w.untyped_storage().nbytes() <= module.CHUNK_BYTES
        launch(weight, w, first_block, blocks)

    monkeypatch.setattr(module, "launch_dequantize", bounded)
    for multiply in (prefill_matmul, ssqr_matmul):
        y = multiply(x.to(DEVICE), layer.weight).cpu()
        assert y.shape == (m, 130)
        assert (y - expected).abs().max() <= 2**-9 * expected.abs().max()  # weights and result rounded to float16
