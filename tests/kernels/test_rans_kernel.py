"""The rANS kernel, bit for bit against the checkpoint's decoder."""

import dataclasses

import pytest
import torch

from helpers.kernel_device import DEVICE
from vllm_latq.coding.rans import stream as rans_stream
from vllm_latq.coding.rans.decoder import decode_stream, decoding_table
from vllm_latq.coding.rans.encoder import encode
from vllm_latq.coding.rans.stream import RansStream
from vllm_latq.errors import CheckpointError
from vllm_latq.format.encodings.rans import RansWeight
from vllm_latq.kernels.dev.audit import RANS
from vllm_latq.kernels.entropy.rans import decode_rans, slot_table
from vllm_latq.kernels.errors import KernelInputError
from vllm_latq.serving.decode import decode_on_device, rans_arguments

pytestmark = pytest.mark.kernel


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 weights instead of 4096, each of which takes the interpreter 10 ms."""
    monkeypatch.setattr(rans_stream, "CHUNK_WEIGHTS", 64)


def encoded(rows: int, cols: int, octaves: float, wild: int = 0) -> RansStream:
    """Random integers whose columns have spreads over so many octaves; the first few far outside any table."""
    generator = torch.Generator().manual_seed(rows * cols)
    z = torch.randn(rows, cols, generator=generator) * torch.exp2(torch.linspace(-1, octaves, cols))
    z = z.round().to(torch.int32)
    z.view(-1)[:wild] = torch.tensor([2**31 - 1, -(2**31), 99999, -77777], dtype=torch.int32)[:wild]
    return encode(z)


def arguments(coded: RansStream) -> tuple:
    return rans_arguments(coded, DEVICE)


@pytest.mark.parametrize(
    ("rows", "cols", "octaves", "wild"),
    # Several chunks of rows, the last one short; of columns, the last one narrow; escapes; a single weight.
    [(10, 20, 3.0, 4), (3, 70, 2.0, 1), (1, 1, 0.0, 0), (2, 20, -9.0, 0)],
)
def test_decodes_bit_for_bit(rows: int, cols: int, octaves: float, wild: int) -> None:
    coded = encoded(rows, cols, octaves, wild)
    expected = decode_stream(coded, "stream")
    given = arguments(coded)
    assert torch.equal(decode_rans(*given).cpu(), expected)
    *_, ranges, frequencies, _, code = given
    slots = slot_table(ranges, frequencies, code)
    assert slots.flatten().tolist() == decoding_table(coded.model()).tolist()


def test_audit_compiles_for_the_constants_of_the_format() -> None:
    assert arguments(encoded(1, 1, 0.0))[-1] == RANS


def test_first_state_that_no_encoder_leaves() -> None:
    """State 1 is slot 1, of the first symbol; what is left of it, 1, takes a word, 0, and is the last state."""
    zero = torch.zeros(1, dtype=torch.int32)
    table = torch.tensor([[5, 1]], dtype=torch.int32), torch.tensor([4095, 1], dtype=torch.int32).to(torch.uint16)
    words, stream = torch.tensor([[3]], dtype=torch.int32).to(torch.uint16), torch.tensor([1, 0], dtype=torch.int32)
    coded = RansStream(zero, zero, *table, words, stream, (1, 1))
    assert decode_stream(coded, "stream").tolist() == decode_rans(*arguments(coded)).tolist() == [[5]]


def test_weights_are_decoded_by_the_kernel_where_there_is_one() -> None:
    coded = encoded(3, 20, 2.0)
    exponents = (torch.zeros(size, dtype=torch.int8) for size in coded.shape)
    weight = RansWeight(torch.ones(1), *exponents, coded)
    assert torch.equal(decode_on_device(weight, "layer", DEVICE).cpu(), decode_stream(coded, "stream"))
    damaged = dataclasses.replace(weight, stream=dataclasses.replace(coded, stream=coded.stream ^ 1))
    with pytest.raises(CheckpointError, match=r"layer\.stream: expected every chunk to end .* copy or download"):
        decode_on_device(damaged, "layer", DEVICE)


def test_corrupt_streams_are_refused_and_read_nothing_outside() -> None:
    stream, chunk_words, classes, *tables = arguments(encoded(3, 30, 2.0, 2))
    (rows, cols), (ranges, frequencies, _, code) = classes, tables
    flipped = stream ^ torch.randint(-(2**31), 2**31, stream.shape, dtype=torch.int64).to(stream)
    with pytest.raises(KernelInputError, match="every chunk to end"):
        decode_rans(flipped, chunk_words, classes, *tables)
    with pytest.raises(KernelInputError, match="words"):
        decode_rans(stream[:-1], chunk_words, classes, *tables)
    with pytest.raises(KernelInputError, match="chunk_words"):
        decode_rans(stream, chunk_words[:-1], classes, *tables)
    with pytest.raises(KernelInputError, match="sums of them below"):
        decode_rans(stream, chunk_words, (rows + 16, cols), *tables)
    signed = rows.to(torch.int32), cols.to(torch.int32)
    for wrong in ((signed[0] - 1, signed[1] + 1), (signed[0], signed[1] - 100)):
        with pytest.raises(KernelInputError, match="classes from 0 on"):
            decode_rans(stream, chunk_words, wrong, *tables)
    with pytest.raises(KernelInputError, match="contiguous vector of int32"):
        decode_rans(stream.repeat_interleave(2)[::2], chunk_words, classes, *tables)
    with pytest.raises(KernelInputError, match="sums of 4096"):
        slot_table(ranges, (2 * frequencies.to(torch.int32).clamp(min=1)).to(torch.uint16), code)
    with pytest.raises(KernelInputError, match="tables of"):
        slot_table(ranges, frequencies[:-1], code)
