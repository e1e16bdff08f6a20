"""Read a checkpoint as FORMAT.md says, with numpy and no code of the package: slow, plain, without validation."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Matrix = np.ndarray
DTYPES = {
    "F32": ("torch.float32", "<f4"),
    "BF16": ("torch.bfloat16", "<u2"),
    "I32": ("torch.int32", "<i4"),
    "U16": ("torch.uint16", "<u2"),
    "I8": ("torch.int8", "i1"),
    "U8": ("torch.uint8", "u1"),
}

# Section 3.4: the factor of each rate of a trellis.
FACTORS = {
    2: 0.009191000834107399, 3: 0.009382479824125767, 4: 0.00995691679418087, 5: 0.010722833685576916,
    6: 0.007032681722193956, 7: 0.007303169462829828, 8: 0.0075736572034657, 9: 0.007708901073783636,
    10: 0.00784414540976286, 11: 0.008114633150398731, 12: 0.008114633150398731,
}  # fmt: skip

NOT_IN_FINGERPRINT = (
    r"^(config\.json|latq_report\.json|latq_evaluation\.json|model\.safetensors\.index\.json|[^/]*\.safetensors)$"
    r"|(^|/)\.|\.md$|(^|/)LICENSE"
)


class Tensor(NamedTuple):
    """A stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def array(self) -> np.ndarray:
        """Return the numbers: integers as int64, floats as float32."""
        name, code = DTYPES[self.dtype]
        values = np.frombuffer(self.data, code).reshape(self.shape)
        if name == "torch.bfloat16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values if name == "torch.float32" else values.astype(np.int64)


def read_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        low, high = entry["data_offsets"]
        tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), content[start + low : start + high])
    return tensors


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of all shards."""
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in read_file(path).items()}


def fingerprint(directory: Path) -> str:
    """Return the fingerprint of section 5."""
    document = json.loads((directory / "config.json").read_text())
    config = document["quantization_config"]
    schemes = [config, *config.setdefault("overrides", {}).values(), *config.get("beside", {}).values()]
    config.setdefault("ignore", [])
    for scheme in schemes:
        scheme.setdefault("outliers", False)
        for key, default in (
            ("bits", None),
            ("group_size", None),
            ("grid", "midtread"),
        ):
            if scheme.get(key, default) == default:
                scheme.pop(key, None)
    for key in ("fingerprint", "recipe"):
        config.pop(key, None)
    lines = [f"config {json.dumps(document, sort_keys=True, separators=(',', ':'))}"]
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and not re.search(NOT_IN_FINGERPRINT, name):
            lines.append(f"file {json.dumps(name)} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    for name, tensor in read_tensors(directory).items():
        sizes = "x".join(str(size) for size in tensor.shape)
        lines.append(f"{name} {DTYPES[tensor.dtype][0]} {sizes} {hashlib.sha256(tensor.data).hexdigest()}")
    return "sha256:" + hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def matrices(directory: Path) -> dict[str, Matrix]:
    """Return W of every quantized linear, float32 [r, c]."""
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    stored, found = read_tensors(directory), {}
    for name in [name.removesuffix(".weight_shape") for name in stored if name.endswith(".weight_shape")]:
        own = {key.removeprefix(f"{name}."): tensor for key, tensor in stored.items() if key.startswith(f"{name}.")}
        found[name] = matrix(own, (config.get("overrides", {}) | config.get("beside", {})).get(name, config))
    return found


def matrix(tensors: Mapping[str, Tensor], scheme: Mapping[str, Any]) -> Matrix:
    """Return W of one linear (section 3), float32 [r, c], from its tensors and its scheme as JSON."""
    arrays = {name: tensor.array() for name, tensor in tensors.items()}
    half = np.float32(0.5 if scheme.get("grid") == "midrise" else 0)
    r, c = arrays["weight_shape"]
    if scheme["encoding"] == "huffman":
        return _huffman(arrays, r, c).astype(np.float32) * arrays["scale"]
    if scheme["encoding"] == "trellis":
        return _trellis(arrays, r, c)
    bits, group = scheme["bits"], scheme["group_size"]
    codes = _unpack(arrays["qweight"], c, bits)
    z, scales = codes - 2 ** (bits - 1), arrays["scales"][:, np.arange(c) // (c if group == -1 else group)]
    outliers: dict[tuple[int, int], np.float32] = {}
    if scheme.get("outliers"):
        ends = arrays["outlier_row_ptr"]
        for i in range(r):
            for k in range(ends[i], ends[i + 1]):
                outliers[i, arrays["outlier_col_idx"][k]] = arrays["outlier_values"][k]
    weights: Matrix = scales * (z.astype(np.float32) + half)
    for place, value in outliers.items():
        weights[place] += value
    return weights


def _unpack(words: np.ndarray, count: int, bits: int) -> Matrix:
    """Return the codes of each row of words (section 3.1), int64 [rows, count]."""
    stream = np.unpackbits(words.astype("<i4").view(np.uint8), axis=1, bitorder="little")
    return stream[:, : count * bits].reshape(len(words), count, bits).astype(np.int64) @ (1 << np.arange(bits))


def _chunks(rows: int, cols: int, weights: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of each chunk of a coded matrix, in stored order."""
    height, width = max(1, weights // cols), min(cols, weights)
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            yield slice(top, min(top + height, rows)), slice(left, min(left + width, cols))


def _huffman(arrays: Mapping[str, np.ndarray], rows: int, cols: int) -> Matrix:
    """Decode a Huffman stream (section 3.3) to z, int64 [rows, cols]."""
    lengths = arrays["code_lengths"].tolist()
    symbols, code, before = {}, 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(lengths) if length):
        code <<= length - before
        symbols[f"{code:0{length}b}"], code, before = symbol, code + 1, length
    stream = "".join(f"{word & 0xFFFFFFFF:032b}" for word in arrays["stream"].tolist())
    z, end = np.empty((rows, cols), np.int64), 0
    for (band, columns), bits in zip(_chunks(rows, cols, 1024), arrays["chunk_bits"].flat, strict=True):
        at, end = end, end + int(bits)
        for i in range(band.start, band.stop):
            for j in range(columns.start, columns.stop):
                length = next(length for length in range(1, 16) if stream[at : at + length] in symbols)
                symbol, at = symbols[stream[at : at + length]], at + length
                z[i, j] = arrays["first_symbol"][0] + symbol
                if symbol == len(lengths) - 1:  # ESCAPE
                    z[i, j], at = _signed(int(stream[at : at + 32], 2)), at + 32
        assert at == end
    return z


def _trellis(arrays: Mapping[str, np.ndarray], rows: int, cols: int) -> Matrix:
    """Decode the rings of a trellis (section 3.4) to W, float32 [rows, cols]."""
    stored, at = np.empty((rows, cols), np.float32), 0  # value * f
    words = arrays["trellis"].astype(np.int64) & 0xFFFFFFFF
    for top in range(0, rows, 16):
        for left in range(0, cols, 16):
            k = int(arrays["rates"][top // 64, left // 128])
            tile = _tile_values(words[at : at + 4 * k], k).astype(np.float32) * np.float32(FACTORS[k])
            band = stored[top : top + 16, left : left + 16]
            band[:], at = tile[: band.shape[0], : band.shape[1]], at + 4 * k
    assert at == len(words)
    weights = np.empty_like(stored)
    weights[:, _stored_columns(arrays["column_importance"].tolist())] = stored
    row_powers, column_powers = (
        np.array([2.0 ** (exponent / 8) for exponent in arrays[name].tolist()], np.float32)
        for name in ("row_exponents", "column_exponents")
    )
    weights = weights * (arrays["scale"] * row_powers)[:, None] * column_powers
    for position, value in zip(arrays["kept_positions"].tolist(), arrays["kept_values"], strict=True):
        weights[position // cols, position % cols] += value
    return weights


def _tile_values(words: np.ndarray, k: int) -> Matrix:
    """Return the values of a tile, int64 [16, 16], from its 4 k words."""
    ring = "".join(f"{word:032b}" for word in words.tolist())
    tile = np.empty((16, 16), np.int64)
    for t in range(128):
        window = int("".join(ring[n % (128 * k)] for n in range((t + 1) * k - 16, (t + 1) * k)), 2)
        values = [0, 0]
        for multiplier in (3400805065, 2253370227)[: 2 if k >= 6 else 1]:
            h = 65537 * window * multiplier % 2**32
            low, second, third, high = (
                byte - (byte >> 7 << 8) for byte in (h % 256, h >> 8 & 255, h >> 16 & 255, h >> 24)
            )
            values = [values[0] + low + third, values[1] + second + high]
        column = 4 * (t // 4 % 4) + 2 * (t // 2 % 2)
        tile[t // 16 + 8 * (t % 2), column : column + 2] = values
    return tile


def _stored_columns(importance: list[int]) -> list[int]:
    """Return the columns in the order in which a trellis stores them."""
    c = len(importance)
    parts = next((p for p in (8, 4, 2) if c % (128 * p) == 0 and c // p >= 256), 1)
    size = c // parts
    return [j for low in range(0, c, size) for j in sorted(range(low, low + size), key=lambda j: (-importance[j], j))]


def _signed(word: int) -> int:
    return word - (word >> 31 << 32)
