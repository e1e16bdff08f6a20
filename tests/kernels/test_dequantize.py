"""Prefill: dense chunks exactly, and the whole product."""

from dataclasses import replace

import pytest
import torch

from helpers.kernel_device import DEVICE
from vllm_latq.kernels.bench.cases import SHAPES
from vllm_latq.kernels.decode import prefill as module
from vllm_latq.kernels.decode.dispatch import ssqr_matmul
from vllm_latq.kernels.decode.prefill import chunk_blocks, dequantize, equal_pieces, launch_dequantize, prefill_matmul
from vllm_latq.kernels.dev.reference import matmul_reference
from vllm_latq.kernels.layout.codes import codes_to_stream
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


def crowded_rows(rows: int, cols: int) -> torch.Tensor:
    """Return where outliers lie, bool [rows, cols]: a full row, empty rows, and columns at the ends of superblocks."""
    mask = torch.rand(rows, cols, generator=torch.Generator().manual_seed(1)) < 0.02
    mask[:, 255:257] = True
    mask[5], mask[6:10] = True, False
    mask[7, 0] = mask[8, -1] = mask[9, 256] = True
    mask[9, 0] = True
    return mask


@pytest.mark.parametrize(("bits", "row_scaled"), [(3, False), (4, True)])
def test_outliers_are_added_to_rounded_weights(bits: int, row_scaled: bool) -> None:
    """Bit for bit, wherever a row's outliers begin and end. Two rows begin with an outlier of value zero."""
    rows, cols, zero_point = 70, 600, 1 << (bits - 1)
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 2 * zero_point, (rows, cols), generator=generator, dtype=torch.uint8)
    mask = crowded_rows(rows, cols)
    outliers = torch.zeros(rows, cols)
    outliers[mask] = torch.randn(int(mask.sum()), generator=generator).bfloat16().float()
    outliers[7, 0] = outliers[9, 0] = 0
    row_ptr = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).to(torch.int32)
    row_scales = torch.randint(32, 96, (rows,), generator=generator) / 64 if row_scaled else torch.ones(rows)
    scales = (torch.rand(rows, 1, generator=generator) + 0.5).bfloat16()
    csr = [row_ptr, mask.nonzero()[:, 1].to(torch.int32), outliers[mask].bfloat16()]
    tensors = [part.to(DEVICE) for part in (codes_to_stream(codes, bits), scales, row_scales, *csr)]
    weight = prepare(tensors[0], bits, -1, cols, tensors[1], tensors[2], OutlierCsr(*tensors[3:]))
    rounded = ((codes.float() - zero_point) * scales.float() * row_scales[:, None]).half()
    expected = (rounded.float() + outliers * row_scales[:, None]).half()  # all products are exact
    assert torch.equal(dequantize(weight, torch.float16).cpu(), expected)


def test_chunks_are_whole_layers_or_equal_pieces(make_layer) -> None:
    """Every layer of a model of 8 billion weights is one chunk; larger weights have chunks of one size."""
    small = make_layer(3, 64, 256).weight

    def chunks(rows: int, cols: int) -> tuple[int, int]:
        order = torch.empty(rows, device="meta")
        step = chunk_blocks(replace(small, order=order, cols=cols), torch.bfloat16)
        assert step * 64 * cols * 2 <= module.CHUNK_BYTES
        return step * 64, -(-rows // (step * 64))

    assert [chunks(*shape)[1] for shape in SHAPES] == [1] * len(SHAPES)
    assert chunks(57344, 8192) == (14336, 4)
    assert chunks(151936 + 128, 4096) == (30464, 5)
    assert [equal_pieces(7, most) for most in (0, 1, 3, 4, 7, 9)] == [1, 1, 3, 4, 7, 7]


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
