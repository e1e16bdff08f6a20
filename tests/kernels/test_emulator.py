"""The PTX emulator on hand-written kernels: what instructions mean, and what it refuses."""

import numpy as np
import pytest

from vllm_latq.kernels.dev.emulation.machine import run
from vllm_latq.kernels.dev.emulation.memory import GlobalMemory, SharedMemory, Traffic, address
from vllm_latq.kernels.dev.emulation.ptx import parse
from vllm_latq.kernels.errors import KernelInputError

THREADS = 64


def execute(body: str, *buffers: np.ndarray, shared: int = 1024, programs: int = 1) -> Traffic:
    """Run `body` with a buffer in each of %rd1, %rd2, ..., the thread in %r0 and four times it in %rd0."""
    parameters = ", ".join(f".param .u64 .ptr .global .align 1 p{i}" for i in range(len(buffers)))
    loads = "".join(f"ld.param.b64 %rd{i + 1}, [p{i}];" for i in range(len(buffers)))
    text = f"""
    .visible .entry k({parameters})
    {{
        .reg .pred %p<10>; .reg .b16 %rs<10>; .reg .b32 %r<50>; .reg .b64 %rd<50>;
        {loads} mov.u32 %r0, %tid.x; mul.wide.u32 %rd0, %r0, 4;
        {body}
        ret;
    }}"""
    memory = GlobalMemory([buffer.view(np.uint8) for buffer in buffers], Traffic())
    addresses = [address(i) for i in range(len(buffers))]
    return run(parse(text), "sm_80", THREADS, shared, (programs, 1, 1), addresses, memory)


def compute(instructions: str, *inputs: np.ndarray) -> np.ndarray:
    """uint32 in %r9, from inputs in %r1, %r2, ..."""
    load = "".join(
        f"add.s64 %rd{i + 20}, %rd{i + 1}, %rd0; ld.global.b32 %r{i + 1}, [%rd{i + 20}];" for i in range(len(inputs))
    )
    out = np.zeros(THREADS, np.uint32)
    store = f"add.s64 %rd40, %rd{len(inputs) + 1}, %rd0; st.global.b32 [%rd40], %r9;"
    execute(load + instructions + store, *inputs, out)
    return out


def words(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, THREADS, dtype=np.uint32)


@pytest.mark.parametrize("lut", [0xEA, 0x6A, 0x96, 0x01, 0x80, 0xCA])
def test_lop3(lut: int) -> None:
    a, b, c = words(0), words(1), words(2)
    bits = [((v[:, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(int) for v in (a, b, c)]
    table = np.array([lut >> i & 1 for i in range(8)])
    expected = (table[4 * bits[0] + 2 * bits[1] + bits[2]] << np.arange(32)).sum(1).astype(np.uint32)
    assert np.array_equal(compute(f"lop3.b32 %r9, %r1, %r2, %r3, {lut:#x};", a, b, c), expected)


def test_shift_of_a_pair_and_high_product() -> None:
    a, b, bits = words(0), words(1), words(2)
    pairs = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    shifted = (pairs >> (bits & 31).astype(np.uint64)).astype(np.uint32)
    assert np.array_equal(compute("shf.r.wrap.b32 %r9, %r1, %r2, %r3;", a, b, bits), shifted)
    high = (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32)
    assert np.array_equal(compute("mul.hi.u32 %r9, %r1, %r2;", a, b), high)


def test_larger_magnitude_and_rounding_down() -> None:
    numbers = np.linspace(-3, 3, THREADS, dtype=np.float32)
    ones = np.full(THREADS, 1.25, np.float32)
    ones[3] = np.nan  # which max leaves out
    both = [values.view(np.uint32) for values in (numbers, ones)]
    largest = compute("abs.f32 %r8, %r1; max.f32 %r9, %r8, %r2;", *both).view(np.float32)
    assert np.array_equal(largest, np.fmax(np.abs(numbers), ones))
    rounded = compute("cvt.rmi.f32.f32 %r8, %r1; cvt.rzi.s32.f32 %r9, %r8;", *both).view(np.int32)
    assert np.array_equal(rounded, np.floor(numbers).astype(np.int32))


@pytest.mark.parametrize(("name", "expected"), [("fma.rn", 2.5), ("add", 3.5), ("sub", -0.5), ("mul", 3.0)])
def test_pairs_of_float32(name: str, expected: float) -> None:
    """1.5 and 2 in the low halves, other numbers in the high ones."""
    low = [np.full(THREADS, value, np.float32).view(np.uint32) for value in (1.5, 2.0, -0.5)]
    packed = "".join(f"mov.b64 %rd{30 + i}, {{%r{i + 1}, %r{(i + 1) % 3 + 1}}};" for i in range(3))
    sources = "%rd30, %rd31, %rd32" if name == "fma.rn" else "%rd30, %rd31"
    low_half = f"{packed} {name}.f32x2 %rd33, {sources}; mov.b64 {{%r9, %r10}}, %rd33;"
    assert (compute(low_half, *low).view(np.float32) == expected).all()
    high = {"fma.rn": 2.0 * -0.5 + 1.5, "add": 2.0 - 0.5, "sub": 2.0 + 0.5, "mul": 2.0 * -0.5}[name]
    assert (compute(low_half + "mov.b32 %r9, %r10;", *low).view(np.float32) == high).all()


@pytest.mark.parametrize(("name", "expected"), [("add.rn", 4.75), ("sub", -1.75)])
@pytest.mark.parametrize(("kind", "half"), [("bf16", 0x3FC0), ("f16", 0x3E00)])
def test_float32_and_a_half(kind: str, half: int, name: str, expected: float) -> None:
    narrow, wide = np.full(THREADS, half, np.uint32), np.full(THREADS, 3.25, np.float32)  # 1.5 and 3.25
    instructions = f"cvt.u16.u32 %rs1, %r1; {name}.f32.{kind} %r9, %rs1, %r2;"
    assert (compute(instructions, narrow, wide.view(np.uint32)).view(np.float32) == expected).all()


def test_half_of_a_pair_may_be_undefined() -> None:
    value = np.full(THREADS, 1.5, np.float32)
    both = "mov.b64 %rd33, {%r1, %r20}; add.f32x2 %rd33, %rd33, %rd33; mov.b64 {%r9, %r10}, %rd33;"
    assert (compute(both, value.view(np.uint32)).view(np.float32) == 3).all()
    assert (compute(both + "mov.b32 %r9, %r10;", value.view(np.uint32)).view(np.float32) < -1e18).all()


def test_shifts_and_fields() -> None:
    a, amount = words(0), np.arange(THREADS, dtype=np.uint32)
    signed = [int(v) - (v >= 2**31) * 2**32 for v in a.tolist()]
    shr = [v >> s & 0xFFFFFFFF for v, s in zip(signed, amount.tolist(), strict=True)]
    assert compute("shr.s32 %r9, %r1, %r2;", a, amount).tolist() == shr
    assert compute("shl.b32 %r9, %r1, %r2;", a, amount).tolist() == [
        int(v) << s & 0xFFFFFFFF for v, s in zip(a, amount.tolist(), strict=True)
    ]
    assert compute("bfe.u32 %r9, %r1, 5, 7;", a).tolist() == [int(v) >> 5 & 127 for v in a]
    assert compute("bfe.s32 %r9, %r1, 5, 1;", a).tolist() == [0xFFFFFFFF * (int(v) >> 5 & 1) for v in a]
    assert compute("div.s32 %r9, %r1, -7;", a).view(np.int32).tolist() == [-int(v / 7) for v in signed]


def test_byte_permutation() -> None:
    a, b = words(0), words(1)
    eight = np.stack([a, b], 1).view(np.uint8)
    expected = np.stack([eight[:, 3], eight[:, 4], eight[:, 0], eight[:, 7]], 1).view(np.uint32)[:, 0]
    assert np.array_equal(compute("prmt.b32 %r9, %r1, %r2, 0x7043U;", a, b), expected)
    signs = compute("prmt.b32 %r9, %r1, %r2, 0x888F;", a, b)
    assert np.array_equal(signs & 255, np.where(eight[:, 7] >= 128, 255, 0))


def test_floats() -> None:
    values = np.linspace(-3, 3, THREADS, dtype=np.float32)
    squares = compute("fma.rn.f32 %r9, %r1, %r1, 0f3F800000;", values).view(np.float32)
    assert np.array_equal(squares, (values.astype(np.float64) ** 2 + 1).astype(np.float32))
    quotient = compute("ex2.approx.f32 %r8, %r1; div.full.f32 %r9, %r1, %r8;", values).view(np.float32)
    np.testing.assert_allclose(quotient, values / 2.0**values, rtol=2**-22)
    values[0] = np.nan
    expected = np.maximum(values, 0)
    largest = compute("max.NaN.f32 %r9, %r1, 0f00000000;", values).view(np.float32)
    np.testing.assert_array_equal(largest, expected)


def test_narrow_floats() -> None:
    """Computed in a wider format, and rounded; the largest of two is NaN where one is."""
    values = np.resize(np.array([-2, -0.0, 0.5, 3, np.nan], np.float32), THREADS)
    for body, expected in (
        ("max.NaN.bf16 %rs2, %rs1, %rs3;", np.maximum(values, 0.5)),
        ("mul.rn.bf16 %rs2, %rs1, %rs1;", values**2),
        ("fma.rn.bf16 %rs2, %rs1, %rs1, %rs3;", values**2 + 0.5),
    ):
        text = f"cvt.rn.bf16.f32 %rs1, %r1; mov.b16 %rs3, 0x3F00; {body} cvt.f32.bf16 %r9, %rs2;"
        np.testing.assert_array_equal(compute(text, values).view(np.float32), expected)
    text = "cvt.rn.f16x2.f32 %r8, %r1, 0f3F000000; max.NaN.f16x2 %r9, %r8, 0;"
    pairs = np.ascontiguousarray(compute(text, values)).view(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(pairs[:, 1], np.maximum(values, 0))
    assert (pairs[:, 0] == 0.5).all()


def test_pairs_of_floats() -> None:
    values = np.linspace(-3, 3, THREADS, dtype=np.float32)
    pairs = compute("cvt.rn.bf16x2.f32 %r9, 0f3F800000, %r1;", values)
    assert np.array_equal(pairs >> 16, np.full(THREADS, 0x3F80))
    assert np.abs((pairs << 16).view(np.float32) - values).max() <= 2**-7


@pytest.mark.parametrize("test", ["eq", "ne", "lt", "ge", "neu"])
def test_comparisons_with_nan_fail_but_one(test: str) -> None:
    values = np.full(THREADS, np.nan, np.float32)
    found = compute(f"setp.{test}.f32 %p1, %r1, 0f3F800000; selp.b32 %r9, 1, 0, %p1;", values)
    assert found.all() if test == "neu" else not found.any()


def test_reads_for_all_warps_need_a_barrier_after_writes_of_several() -> None:
    shared = SharedMemory(64, THREADS, Traffic())
    everyone, place = np.ones(THREADS, bool), np.zeros(THREADS, np.uint32)
    shared.store(place, np.zeros((THREADS, 4), np.uint8), everyone, "st")
    with pytest.raises(KernelInputError, match="barrier after a write"):
        shared.load_for_all(place[:1], 4, "wgmma")
    shared.barrier()
    shared.load_for_all(place[:1], 4, "wgmma")
    with pytest.raises(KernelInputError, match="barrier after a read"):
        shared.store(place, np.zeros((THREADS, 4), np.uint8), everyone, "st")


def test_lanes() -> None:
    a = words(0)
    lanes = np.arange(THREADS)
    assert np.array_equal(compute("shfl.sync.bfly.b32 %r9, %r1, 4, 31, -1;", a), a[lanes ^ 4])
    assert np.array_equal(compute("shfl.sync.idx.b32 %r9, %r1, 3, 31, -1;", a), a[lanes // 32 * 32 + 3])
    above = np.where(lanes % 32 < 5, lanes, lanes - 5)
    assert np.array_equal(compute("shfl.sync.up.b32 %r9, %r1, 5, 0, -1;", a), a[above])
    largest = a.view(np.int32).reshape(2, 32).max(1).repeat(32)
    assert np.array_equal(compute("redux.sync.max.s32 %r9, %r1, -1;", a).view(np.int32), largest)


def test_guards_and_loops() -> None:
    """Thread t adds 3 to itself five times, unless it is odd."""
    loop = """
        and.b32 %r2, %r0, 1; setp.eq.b32 %p1, %r2, 0; mov.b32 %r9, %r0; mov.b32 %r3, 0;
        $again: @%p1 add.s32 %r9, %r9, 3; add.s32 %r3, %r3, 1; setp.lt.s32 %p2, %r3, 5; @%p2 bra $again;"""
    assert compute(loop).tolist() == [t if t % 2 else t + 15 for t in range(THREADS)]


def test_traffic() -> None:
    buffer = np.zeros(64 * THREADS, np.uint32)
    near = execute("add.s64 %rd9, %rd1, %rd0; ld.global.b32 %r1, [%rd9];", buffer)
    assert (near.loaded, near.load_sectors) == (4 * THREADS, 4 * THREADS // 32)
    far = execute("mul.wide.u32 %rd8, %r0, 256; add.s64 %rd9, %rd1, %rd8; ld.global.b32 %r1, [%rd9];", buffer)
    assert (far.loaded, far.load_sectors) == (4 * THREADS, THREADS)
    apart = execute("shl.b32 %r1, %r0, 7; st.shared.b32 [%r1], %r0;", shared=128 * THREADS)
    assert (apart.ideal_wavefronts, apart.wavefronts) == (2, 64)  # one bank
    beside = execute("shl.b32 %r1, %r0, 3; st.shared.b64 [%r1], %rd0;", shared=8 * THREADS)
    assert (beside.ideal_wavefronts, beside.wavefronts) == (4, 4)


WRITE = "shl.b32 %r1, %r0, 2; st.shared.b32 [%r1], %r0;"
COPY = "shl.b32 %r1, %r0, 2; add.s64 %rd9, %rd1, %rd0; cp.async.ca.shared.global [ %r1 + 0 ], [ %rd9 + 0 ], 0x4;"
OTHER_WARP = "xor.b32 %r2, %r1, 128; ld.shared.b32 %r3, [%r2];"
REFUSED = {
    "behind the end": ("add.s64 %rd9, %rd1, %rd0; ld.global.b32 %r1, [%rd9+4];", r"bytes 0 to 256 of buffer 0"),
    "before the start": ("ld.global.b32 %r1, [%rd1+-4];", "buffers"),
    "null": ("mov.b64 %rd9, 0; ld.global.b32 %r1, [%rd9];", "buffers"),
    "misaligned": ("ld.global.b32 %r1, [%rd1+2];", "aligned to 4"),
    "conflicting stores": ("st.global.b32 [%rd1], %r0;", "one value per address"),
    "shared, behind the end": ("mov.b32 %r1, 1024; ld.shared.b32 %r2, [%r1];", "bytes 0 to 1024"),
    "shared, never written": ("mov.b32 %r1, 0; ld.shared.b32 %r2, [%r1];", "were written"),
    "race of write and read": (WRITE + OTHER_WARP, "barrier after a write"),
    "race of read and write": (
        WRITE + "bar.sync 0;" + OTHER_WARP + "st.shared.b32 [%r1], %r0;", "barrier after a read",
    ),
    "copy not waited for": (COPY + "ld.shared.b32 %r2, [%r1];", "waited for"),
    "copy in a later group": (
        COPY + "cp.async.commit_group; cp.async.wait_group 1; ld.shared.b32 %r2, [%r1];", "waited for",
    ),
    "copy without a barrier": (
        COPY + "cp.async.commit_group; cp.async.wait_group 0;" + OTHER_WARP, "barrier after a write",
    ),
    "copy over a copy": (COPY + "bar.sync 0;" + COPY, "waited for"),
    "store into a copy": (COPY + "bar.sync 0; st.shared.b32 [%r1], %r0;", "waited for"),
    "copy unless": ("setp.ne.b32 %p1, %r0, %r0;" + COPY.replace("0x4;", "0x4, %p1;"), "not a predicate"),
    "barrier of some": ("bar.sync 1, 32;", "all threads"),
    "guarded shuffle": ("setp.eq.b32 %p1, %r0, 0; @%p1 shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;", "without a guard"),
    "guarded wait": ("setp.eq.b32 %p1, %r0, 0; @%p1 cp.async.wait_group 0;", "without a guard"),
    "high product": ("mul.hi.s32 %r1, %r0, %r0;", "arithmetic that"),
    "quotient of floats": ("div.rn.f32 %r1, %r0, %r0;", "arithmetic that"),
    "sum of bf16": ("add.rn.bf16 %rs1, %rs2, %rs2;", "arithmetic that"),
    "larger number": ("max.bf16 %rs1, %rs2, %rs2;", "arithmetic that"),
    "comparison of bf16": ("setp.lt.bf16 %p1, %rs1, %rs1;", "comparison that"),
    "rounding to integers": ("cvt.rni.s32.f32 %r1, %r0;", "conversion that"),
    "divergence": ("setp.eq.b32 %p1, %r0, 0; @%p1 bra $end; mov.b32 %r1, 0; $end:", "all or no threads"),
    "unknown operand": ("mov.u32 %r1, %laneid;", "operand that the emulator knows"),
    "unknown": ("sin.approx.f32 %r1, %r0;", "instruction that the emulator knows"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    body, message = REFUSED[name]
    with pytest.raises(KernelInputError, match=message):
        execute(body, np.zeros(THREADS, np.uint32))


def test_copies_arrive_after_their_wait() -> None:
    source = words(0)
    out = np.zeros(THREADS, np.uint32)
    body = COPY + "cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;" + OTHER_WARP
    execute(body + "add.s64 %rd9, %rd2, %rd0; st.global.b32 [%rd9], %r3;", source, out)
    assert np.array_equal(out, source[np.arange(THREADS) ^ 32])


def test_programs_run_in_any_order_and_count_by_atomics() -> None:
    counter, out = np.zeros(1, np.uint32), np.zeros(5, np.uint32)
    body = """
        setp.eq.b32 %p1, %r0, 0; mov.u32 %r2, %ctaid.x; mul.wide.u32 %rd9, %r2, 4; add.s64 %rd9, %rd2, %rd9;
        @%p1 atom.global.gpu.acq_rel.add.u32 %r1, [ %rd1 + 0 ], 2; @%p1 st.global.b32 [%rd9], %r1;"""
    execute(body, counter, out, programs=5)
    assert counter[0] == 10
    assert out.tolist() == [0, 2, 4, 6, 8]
