"""Global and shared memory of an emulated GPU: every access is checked, and what it moves is counted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_latq.kernels.errors import require

WARP = 32
SECTOR = 32  # bytes: the unit of transfers from L2 and DRAM
LINE = 128  # bytes: what the L1 cache looks up in a cycle
_BUFFER_SHIFT = 40  # an address is a buffer's number above this bit, and an offset below
_NOBODY, _SEVERAL, _EVERYBODY = -1, -2, -3


@dataclass
class Traffic:
    """Bytes that a launch moved.

    Attributes:
        loaded: bytes that global loads asked for.
        load_sectors, store_sectors: 32-byte sectors that those touched, per warp and instruction.
        distinct_sectors: of them, those that a launch loaded for the first time; the rest can come from a cache.
        lines: 128-byte lines that loads touched, per warp and instruction.
        wavefronts, ideal_wavefronts: shared-memory cycles of 128 bytes, and what they would be without bank conflicts.
        barriers: of whole programs.
    """

    loaded: int = 0
    load_sectors: int = 0
    store_sectors: int = 0
    distinct_sectors: int = 0
    lines: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    barriers: int = 0


def address(buffer: int) -> int:
    """Address of the first byte of a buffer. It is never 0, so a null pointer is out of bounds."""
    return (buffer + 1) << _BUFFER_SHIFT


class GlobalMemory:
    """The tensors that a launch may touch; everything else is out of bounds."""

    def __init__(self, buffers: Sequence[np.ndarray], traffic: Traffic) -> None:
        """buffers: uint8, contiguous; written in place."""
        self.buffers, self.traffic = buffers, traffic
        self.loaded = [np.zeros(buffer.size // SECTOR + 1, bool) for buffer in buffers]

    def _locate(self, addresses: np.ndarray, size: int, active: np.ndarray, text: str) -> tuple[int, np.ndarray]:
        """The buffer that the active threads access, and their byte offsets; checks bounds and alignment."""
        used = (addresses if active.all() else addresses[active]).astype(np.int64)
        index = (int(used[0]) >> _BUFFER_SHIFT) - 1
        found = f"address {int(used[0]):#x}"
        require(0 <= index < len(self.buffers), text, f"one of {len(self.buffers)} buffers", found)
        offsets, available = used - address(index), self.buffers[index].size
        first, end = int(offsets.min()), int(offsets.max()) + size
        require(first >= 0 and end <= available, text, f"bytes 0 to {available} of buffer {index}", f"{first}..{end}")
        # Sizes are powers of two: an offset that is no multiple has one of the bits below.
        require(not int(np.bitwise_or.reduce(offsets)) % size, text, f"addresses aligned to {size} bytes", "others")
        return index, offsets

    def _touched(self, addresses: np.ndarray, active: np.ndarray, size: int) -> int:
        """Different sectors, or lines, of so many bytes that each warp touches, added up."""
        sectors = np.where(active, addresses.astype(np.int64) // size, -1).reshape(-1, WARP)
        sectors.sort(1)
        return int(np.count_nonzero(sectors[:, 1:] != sectors[:, :-1]) + np.count_nonzero(sectors[:, 0] >= 0))

    def prefetch(self, addresses: np.ndarray, active: np.ndarray, text: str) -> None:
        """Prefetch: without effect here, but a GPU would read the addresses, so they are checked."""
        if active.any():
            self._locate(addresses, 1, active, text)

    def load(self, addresses: np.ndarray, size: int, active: np.ndarray, text: str) -> np.ndarray:
        """uint8 [threads, size]; zeros where inactive."""
        values = np.zeros((addresses.size, size), np.uint8)
        if active.any():
            index, offsets = self._locate(addresses, size, active, text)
            self.traffic.loaded += offsets.size * size
            self.traffic.load_sectors += self._touched(addresses, active, SECTOR)
            self.traffic.lines += self._touched(addresses, active, LINE)
            loaded, sectors = self.loaded[index], offsets // SECTOR
            first = sectors[~loaded[sectors]]
            if first.size:
                self.traffic.distinct_sectors += np.unique(first).size
                loaded[first] = True
            values[active] = self.buffers[index][offsets[:, None] + np.arange(size)]
        return values

    def store(self, addresses: np.ndarray, values: np.ndarray, active: np.ndarray, text: str) -> None:
        """values: uint8 [threads, size]. Threads must not write one place differently."""
        if active.any():
            index, offsets = self._locate(addresses, values.shape[1], active, text)
            self.traffic.store_sectors += self._touched(addresses, active, SECTOR)
            buffer, at = self.buffers[index], offsets[:, None] + np.arange(values.shape[1])
            buffer[at] = values[active]
            require(bool((buffer[at] == values[active]).all()), text, "one value per address", "threads that disagree")


class SharedMemory:
    """Shared memory of one program. Warps that touch a byte without a barrier in between race, unless all of them read.

    A byte that an asynchronous copy is to write must not be touched before the copy was waited for.
    """

    def __init__(self, size: int, threads: int, traffic: Traffic) -> None:
        self.data = np.zeros(size, np.uint8)
        self.known = np.zeros(size, bool)
        self.pending = np.zeros(size, bool)
        self.writer = np.full(size, _NOBODY, np.int32)
        self.reader = np.full(size, _NOBODY, np.int32)
        self.warps = np.arange(threads, dtype=np.int32) // WARP
        self.traffic = traffic

    def barrier(self) -> None:
        """Forget who wrote and read each byte, as all threads have met."""
        self.writer.fill(_NOBODY)
        self.reader.fill(_NOBODY)
        self.traffic.barriers += 1

    def _bytes(self, addresses: np.ndarray, size: int, text: str) -> np.ndarray:
        """Indices [threads, size]; checks bounds and alignment."""
        first, end = int(addresses.min()), int(addresses.max()) + size
        require(first >= 0 and end <= self.data.size, text, f"bytes 0 to {self.data.size}", f"{first}..{end}")
        require(not (addresses % size).any(), text, f"addresses aligned to {size} bytes", "others")
        return addresses.astype(np.int64)[:, None] + np.arange(size)

    def _count(self, addresses: np.ndarray, size: int, active: np.ndarray) -> None:
        """Wavefronts: 128 bytes at a time, as many cycles as a bank of four bytes has different words to serve."""
        words = addresses.astype(np.int64)[:, None] // 4 + np.arange(max(size // 4, 1))
        groups = np.sort(np.where(active[:, None], words, -1).reshape(-1, WARP), 1)
        different = groups >= 0
        different[:, 1:] &= groups[:, 1:] != groups[:, :-1]
        group, _ = different.nonzero()
        served = np.bincount(group * 32 + groups[different] % 32, minlength=groups.shape[0] * 32).reshape(-1, 32)
        self.traffic.wavefronts += int(served.max(1).sum())
        self.traffic.ideal_wavefronts += int((groups[:, -1] >= 0).sum())

    def _check_read(self, at: np.ndarray, warps: np.ndarray | np.int32, text: str) -> None:
        require(bool(self.known[at].all()), text, "bytes that were written", "others")
        require(not self.pending[at].any(), text, "copies that were waited for", "a read before that")
        writer = self.writer[at]
        require(bool(((writer == _NOBODY) | (writer == warps)).all()), text, "a barrier after a write", "none")
        reader = self.reader[at]
        self.reader[at] = np.where((reader == _NOBODY) | (reader == warps), warps, _SEVERAL)
        # Warps that read a byte in this very instruction: the last one's number was kept, so look again.
        self.reader[at[self.reader[at] != warps]] = _SEVERAL

    def _check_write(self, at: np.ndarray, warps: np.ndarray, text: str) -> None:
        require(not self.pending[at].any(), text, "copies that were waited for", "a write before that")
        for owner, deed in ((self.reader, "read"), (self.writer, "write")):
            found = owner[at]
            require(bool(((found == _NOBODY) | (found == warps)).all()), text, f"a barrier after a {deed}", "none")
        self.writer[at] = np.broadcast_to(warps, at.shape)
        self.writer[at[self.writer[at] != warps]] = _SEVERAL  # several warps in this very instruction

    def load(self, addresses: np.ndarray, size: int, active: np.ndarray, text: str) -> np.ndarray:
        """uint8 [threads, size]; zeros where inactive."""
        values = np.zeros((addresses.size, size), np.uint8)
        if active.any():
            at = self._bytes(addresses[active], size, text)
            self._check_read(at, self.warps[active][:, None], text)
            self._count(addresses, size, active)
            values[active] = self.data[at]
        return values

    def load_for_all(self, addresses: np.ndarray, size: int, text: str) -> np.ndarray:
        """uint8 [accesses, size], read on behalf of all warps: no warp may have written since the last barrier."""
        at = self._bytes(addresses, size, text)
        self._check_read(at, np.int32(_EVERYBODY), text)
        return self.data[at]

    def store(self, addresses: np.ndarray, values: np.ndarray, active: np.ndarray, text: str) -> None:
        """values: uint8 [threads, size]."""
        if active.any():
            at = self._bytes(addresses[active], values.shape[1], text)
            self._check_write(at, self.warps[active][:, None], text)
            self._count(addresses, values.shape[1], active)
            self.data[at] = values[active]
            self.known[at] = True
            require(
                bool((self.data[at] == values[active]).all()), text, "one value per address", "threads that disagree"
            )

    def begin_copy(self, addresses: np.ndarray, size: int, active: np.ndarray, text: str) -> None:
        """An asynchronous copy may write from now on."""
        if active.any():
            at = self._bytes(addresses[active], size, text)
            self._check_write(at, self.warps[active][:, None], text)
            self.known[at] = self.pending[at] = True

    def end_copy(self, addresses: np.ndarray, values: np.ndarray, active: np.ndarray, text: str) -> None:
        """The copy was waited for: its warp may read, others after a barrier."""
        if active.any():
            at = self._bytes(addresses[active], values.shape[1], text)
            self.pending[at] = False
            self.writer[at] = np.broadcast_to(self.warps[active][:, None], at.shape)
            self._count(addresses, values.shape[1], active)
            self.data[at] = values[active]
