"""References of the kernels in plain torch. They share no helper with them, and read the checkpoint bit by bit.

W[i, j] = row_scales[i] * (scales[i, j // group_size] * (code[i, j] - zero) + outlier[i, j])

where zero is 2^(bits - 1), less 1/2 on a mid-rise grid.
"""

import torch


def dequantize_reference(
    qweight: torch.Tensor,
    bits: int,
    group_size: int,
    cols: int,
    scales: torch.Tensor | None = None,
    row_scales: torch.Tensor | None = None,
    outliers: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    midrise: bool = False,
) -> torch.Tensor:
    """Return the weight matrix of checkpoint tensors, float64 [rows, cols].

    Args:
        qweight: int32 [rows, ceil(cols * bits / 32)], a little-endian bit stream per row.
        scales: bfloat16 [rows, groups] or None for 1.
        row_scales: float32 [rows] or None for 1.
        outliers: CSR row_ptr, col_idx and values, or None; entries of one place add up.
        midrise: whether the grid lies half a step above the multiples of the scale.
    """
    rows, device = qweight.shape[0], qweight.device
    stream = (qweight.to(torch.int64)[:, :, None] >> torch.arange(32, device=device)) & 1
    bit = stream.reshape(rows, -1)[:, : cols * bits].reshape(rows, cols, bits)
    code = (bit << torch.arange(bits, device=device)).sum(-1)
    weight = code.double() - 2 ** (bits - 1) + 0.5 * midrise
    if scales is not None:
        group = torch.arange(cols, device=device) // (cols if group_size == -1 else group_size)
        weight *= scales.double()[:, group]
    if outliers is not None:
        row_ptr, col_idx, values = outliers
        for row in range(rows):
            entry = slice(int(row_ptr[row]), int(row_ptr[row + 1]))
            weight[row].index_add_(0, col_idx[entry].to(torch.int64), values[entry].double())
    if row_scales is not None:
        weight *= row_scales.double()[:, None]
    return weight


def matmul_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [m, cols] times weight [rows, cols] transposed, float64 [m, rows]."""
    return x.double() @ weight.double().t()


def huffman_reference(
    stream: torch.Tensor,
    chunk_bits: torch.Tensor,
    code_lengths: torch.Tensor,
    first_symbol: int,
    shape: tuple[int, int],
    chunk_shape: tuple[int, int],
) -> torch.Tensor:
    """Return the integers of an entropy-coded layer, int32 `shape`, read bit by bit; see `decode_huffman`."""
    meaning = canonical_codes(code_lengths.tolist())
    bits = "".join(format(word & 0xFFFFFFFF, "032b") for word in stream.tolist())
    (rows, cols), (chunk_rows, chunk_cols) = shape, chunk_shape
    z = torch.zeros(rows, cols, dtype=torch.int32)
    position = 0
    for block_row in range(chunk_bits.shape[0]):
        for block_col in range(chunk_bits.shape[1]):
            end = position + int(chunk_bits[block_row, block_col])
            for row in range(block_row * chunk_rows, min((block_row + 1) * chunk_rows, rows)):
                for col in range(block_col * chunk_cols, min((block_col + 1) * chunk_cols, cols)):
                    length = 1
                    while (length, int(bits[position : position + length], 2)) not in meaning:
                        length += 1
                    index = meaning[length, int(bits[position : position + length], 2)]
                    position += length
                    if index == code_lengths.numel() - 1:
                        raw = int(bits[position : position + 32], 2)
                        z[row, col] = raw - (raw >> 31 << 32)
                        position += 32
                    else:
                        z[row, col] = first_symbol + index
            assert position == end, "a chunk does not use its stored number of bits"
    return z


def canonical_codes(lengths: list[int]) -> dict[tuple[int, int], int]:
    """Return symbol index by (length, code)."""
    meaning, code, previous = {}, 0, 0
    for index in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: (lengths[i], i)):
        code <<= lengths[index] - previous
        meaning[lengths[index], code] = index
        code, previous = code + 1, lengths[index]
    return meaning
