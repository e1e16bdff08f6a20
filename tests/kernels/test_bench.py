"""The benchmark without a GPU: cases, gate, table and JSON on a tiny layer in the interpreter; the roofline.

Timers here return made-up numbers: what is tested is what happens to them.
"""

import importlib.metadata
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers.kernel_device import emulated_gpu
from helpers.made_up_times import Watched, five_microseconds
from helpers.pretend_gpu import DEVICE as PRETENDED
from helpers.slow import slow
from vllm_latq.kernels.bench import peers
from vllm_latq.kernels.bench.bench import (
    environment,
    launch_once,
    main,
    parse,
    report,
    selection,
    table_row,
    write_json,
)
from vllm_latq.kernels.bench.cases import LARGE, SHAPES, Case, Layer, all_cases, layer_of, make_layer, relative_error
from vllm_latq.kernels.bench.many_tokens import TENSOR_TFLOPS, estimate
from vllm_latq.kernels.bench.many_tokens import main as print_many_tokens
from vllm_latq.kernels.bench.measure import Bench, Result
from vllm_latq.kernels.bench.measure_experts import ExpertBench
from vllm_latq.kernels.bench.roofline import (
    CYCLES,
    GPUS,
    bytes_per_weight,
    least_microseconds,
    print_tables,
    trellis_bytes_per_weight,
)
from vllm_latq.kernels.bench.timing import Timing, copies_beyond_cache, summary
from vllm_latq.kernels.configs import AMPERE, REGIMES, SIMT
from vllm_latq.kernels.decode.dispatch import ssqr_matmul
from vllm_latq.kernels.dev.reference import matmul_reference

pytestmark = pytest.mark.usefixtures("truncated_outputs")

CPU = torch.device("cpu")


@pytest.fixture
def bench() -> Bench:
    return Bench(CPU, five_microseconds, cache=1, copy_rate=100.0, peer_bits={})


def test_all_cases_cover_what_is_asked() -> None:
    cases = list(all_cases())
    assert len(set(cases)) == len(cases)
    assert {(case.rows, case.cols) for case in cases} == {*SHAPES, LARGE}
    for m, paths in {
        1: {"tensor_core", "simt", "trellis"},
        8: {"tensor_core", "trellis"},
        64: {"tensor_core", "trellis", "trellis_prefill"},
        128: {"tensor_core", "prefill", "trellis_prefill"},
        512: {"prefill", "trellis_prefill"},
    }.items():
        assert {case.path for case in cases if case.m == m} == paths
    spread = [case for case in all_cases(spread=True) if case.is_spread]
    assert {(case.m, case.bits) for case in spread} == {
        (m, b) for m in (1, 2, 4, 8, 16, 32, 64, 128) for b in (2, 3, 4)
    }
    assert all(case.outlier_rate for case in spread)


@pytest.mark.interpreter
def test_rows_and_json(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = list(all_cases(shapes=((64, 256),), bits=(3,), rates=(0.0, 0.05), rows=(1, 129)))
    path, bench.compilers = tmp_path / "results" / "cpu.json", Watched()
    assert report(bench, cases, environment(CPU, 100.0), path) == 0
    assert bench.compilers.shapes == [(case.m, 64) for case in cases]
    found = json.loads(path.read_text())
    assert {"device", "torch", "triton", "commit", "copy_gb_per_s", "vllm"} <= set(found)
    kernels = [row["kernel"] for row in found["results"]]
    assert kernels.count("bf16") == 2  # once for each number of rows, whatever the outliers
    assert kernels.count("read") == 3  # once for each weight
    assert sorted(set(kernels)) == ["bf16", "prefill", "read", "simt", "tensor_core", "trellis", "trellis_prefill"]
    assert all(row["speedup"] == 1.0 and row["timing"]["median"] == 5.0 for row in found["results"])
    ours = next(row for row in found["results"] if row["kernel"] == "tensor_core")
    words = 128 * 256 * 3 // 8 + 128 * 2 * 2  # rows are padded to 128; two groups of bf16 scales
    assert ours["bytes"] == words + 2 * (64 + 256)
    assert next(row for row in found["results"] if row["kernel"] == "read")["bytes"] == words
    assert ours["gb_per_s"] == pytest.approx(ours["bytes"] / 5e-6 / 1e9)
    assert ours["roofline"] == pytest.approx(ours["gb_per_s"] / 100)
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("| 64x256")]) == len(kernels)


@pytest.mark.interpreter
@pytest.mark.parametrize("kernel", ["tensor_core", "trellis"])
def test_a_wrong_product_is_not_timed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    def damaged(case: Case, device: torch.device) -> object:
        layer = layer_of(case, device)
        layer.weight.words.view(-1)[3] ^= 0x7FFFFFFF
        return layer

    monkeypatch.setattr("vllm_latq.kernels.bench.measure.layer_of", damaged)
    case = Case(64, 256, 4, 0.0, 1, kernel)
    assert report(bench, [case], {}, tmp_path / "out.json") == 1
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [row["timing"] is None for row in rows] == [False, False, True]  # neither bf16 nor "read" multiplies them
    assert rows[2]["gb_per_s"] is None


@dataclass
class ExpertRun:
    """The rows that a benchmark of four experts wrote for one token and for nine, and what it was made of."""

    wrong: int
    rows: list[dict]
    layer_bytes: list[int]
    compiled: list[tuple[int, ...]]


def run_experts(path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, hidden: int, damage: int = 0) -> ExpertRun:
    """Run the benchmark of experts in the emulator, with `damage` flipped in a word of every layer."""
    compilers = Watched()
    bench = ExpertBench(PRETENDED, five_microseconds, 1, 100.0, {}, compilers, experts=4, chosen=2)
    layer_bytes = []

    def damaged(case: Case, device: torch.device, seed: int) -> Layer:
        layer = layer_of(case, device, seed)
        layer.weight.words.view(-1)[3] ^= damage
        layer_bytes.append(layer.weight.storage_bytes())
        return layer

    monkeypatch.setattr("vllm_latq.kernels.bench.measure_experts.layer_of", damaged)
    monkeypatch.setattr("vllm_latq.kernels.bench.measure_experts.ROUTINGS", 2)
    cases = [Case(hidden, 2 * hidden, 3, 0.01, tokens, kernel) for tokens in (1, 9)]
    with emulated_gpu("sm_80"):
        wrong = report(bench, cases, {}, path)
    return ExpertRun(wrong, json.loads(path.read_text())["results"], layer_bytes, compilers.shapes)


@pytest.mark.compiler
@pytest.mark.parametrize(("kernel", "hidden"), [("experts", 128), *slow([("trellis_experts", 64)])])
def test_layers_of_experts_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str, hidden: int) -> None:
    run = run_experts(tmp_path / "out.json", monkeypatch, kernel, hidden)
    one, many = run.rows
    all_experts = sum(run.layer_bytes)
    assert run.wrong == 0
    assert run.compiled == [(1, hidden), (9, hidden)]
    assert many["bytes"] == all_experts + 2 * 2 * 9 * hidden
    assert 0.9 * all_experts / 2 < one["bytes"] < 1.1 * all_experts / 2  # one token asks for two experts of four
    assert all(row["error"] < 2**-6 and row["speedup"] is None for row in run.rows)


@pytest.mark.compiler
def test_wrong_layers_of_experts_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_experts(tmp_path / "out.json", monkeypatch, "experts", 128, damage=0x7FFFFFFF)
    assert run.wrong == 2
    assert [row["timing"] for row in run.rows] == [None, None]


def test_failures_are_printed_without_a_time(bench: Bench) -> None:
    case = Case(64, 256, 4, 0.01, 1, "simt")
    result = bench._result(case, "simt", float("nan"), 100, [])
    assert result.timing is None
    assert "FAILED" in table_row(result)
    slow = replace(result, timing=Timing(9.0, 8.0, 10.0), gb_per_s=1.0, roofline=0.1, speedup=0.5)
    assert table_row(slow) == "| 64x256 | 4 | 1% | 1 | simt | 9.0 | 1 | 10% | 0.50 |"


@pytest.mark.interpreter
def test_a_row_that_raises_does_not_take_the_others_with_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(case: Case, device: torch.device) -> object:
        if case.bits == 2:
            raise torch.cuda.OutOfMemoryError("as if 2 bits took all memory\nand more")
        return layer_of(case, device)

    def no_simt(launches: list) -> Timing:
        if launches[0].keywords.get("config") is SIMT:
            raise RuntimeError("as if this did not compile")
        return five_microseconds(launches)

    monkeypatch.setattr("vllm_latq.kernels.bench.measure.layer_of", too_large)
    bench.timer = no_simt
    cases = list(all_cases(shapes=((64, 256),), bits=(2, 3), rates=(0.0,), rows=(1,)))
    assert report(bench, cases, {}, tmp_path / "out.json") == 3 + 1
    found = json.loads((tmp_path / "out.json").read_text())
    reasons = {(row["case"]["bits"], row["kernel"]): row["reason"] for row in found["results"]}
    assert reasons[2, "tensor_core"] == "OutOfMemoryError: as if 2 bits took all memory"
    assert reasons[3, "simt"] == "RuntimeError: as if this did not compile"
    assert reasons[3, "tensor_core"] == reasons[16, "bf16"] == ""
    assert found["complete"]


@pytest.mark.interpreter
@pytest.mark.parametrize("pause", [0, 1000])
def test_a_run_that_is_cut_short_has_written_its_rows(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: int
) -> None:
    """While it runs, and when it is interrupted."""
    monkeypatch.setattr("vllm_latq.kernels.bench.bench.WRITE_SECONDS", pause)
    cases = list(all_cases(shapes=((64, 256),), bits=(3,), rates=(0.0,), rows=(1, 2)))
    path = tmp_path / "out.json"
    assert report(bench, cases, {}, path, minutes=0) == 0
    found = json.loads(path.read_text())
    assert [row["kernel"] for row in found["results"]] == ["bf16"]
    assert not found["complete"]

    seen = []

    def killed(launches: list) -> Timing:
        seen.append(len(json.loads(path.read_text())["results"]) if path.exists() else 0)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return five_microseconds(launches)

    path.unlink()
    again = Bench(CPU, killed, cache=1, copy_rate=100.0, peer_bits={})
    with pytest.raises(KeyboardInterrupt):
        report(again, cases, {}, path)
    assert seen == ([0, 0, 0] if pause else [0, 1, 2])
    assert len(json.loads(path.read_text())["results"]) == 2


@pytest.mark.interpreter
def test_a_peer_that_does_not_run_here_is_a_row(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's Marlin takes the arguments it is given, up to the kernel that a CPU lacks; made once for all rows."""
    made, make = [], peers.make
    monkeypatch.setattr(peers, "make", lambda *arguments: made.append(arguments) or make(*arguments))
    bench.peer_bits = {"marlin": (4,)}
    cases = list(all_cases(shapes=((64, 256),), bits=(4,), rates=(0.0, 0.05), rows=(1, 2)))
    wrong = report(bench, cases, {}, tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert wrong == sum(row["timing"] is None for row in found if row["kernel"] != "marlin")
    rows = [row for row in found if row["kernel"] == "marlin"]
    assert [row["case"]["m"] for row in rows] == [1, 2]
    assert all("marlin_gemm" in row["reason"] and row["timing"] is None for row in rows)
    assert capsys.readouterr().out.count("| marlin | not measured: ") == 2
    assert len(made) == 1


@pytest.mark.interpreter
@pytest.mark.parametrize(("tolerance", "timed"), [((), False), ((2**-4,), True)])
def test_a_peer_is_held_to_its_own_weight_and_tolerance(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tolerance: tuple[float, ...], timed: bool
) -> None:
    def off_by_a_32nd(name: str, dense: torch.Tensor, bits: int, group_size: int, cache: int) -> peers.Peer:
        other = dense + 1  # a weight of its own
        product = partial(torch.nn.functional.linear, weight=(other * (1 + 2**-5)).bfloat16())
        return peers.Peer([product, product], other, 7, *tolerance)

    monkeypatch.setattr(peers, "make", off_by_a_32nd)
    bench.peer_bits = {"other": (4,)}
    report(bench, [Case(64, 256, 4, 0.0, 3, "tensor_core")], {}, tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    row = next(row for row in rows if row["kernel"] == "other")
    assert (row["timing"] is not None) == timed
    assert row["error"] == pytest.approx(2**-5, rel=0.3)
    assert row["bytes"] == 7 + 2 * 3 * (64 + 256)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_layers_are_what_their_dense_weight_says(rate: float) -> None:
    layer = make_layer(Case(70, 256, 3, rate, 1, "tensor_core"), CPU)
    x = torch.randn(2, 256).bfloat16()
    expected = matmul_reference(x, layer.dense)
    assert relative_error(expected, x, layer.dense) < 1e-12
    assert relative_error(expected + 1, x, layer.dense) > 1e-3
    assert relative_error(expected * float("nan"), x, layer.dense) == float("inf")


def test_refuses_a_machine_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match="expected a CUDA GPU, found none"):
        main(["--quick"])


@pytest.mark.parametrize(
    ("command", "suffix", "bits", "rates", "rows"),
    [
        ("", "", {2, 3, 4}, {0.0, 0.005, 0.01, 0.02, 0.05}, {1, 2, 4, 8, 16, 32, 64, 128, 512}),
        ("--quick --rows 3", "-quick-3rows", {2, 3, 4}, {0.0, 0.01}, {3}),
        ("--bits 3 4 --outliers 0 0.5", "-3-4bits-0-0.5percent", {3, 4}, {0.0, 0.005}, None),
        ("--experts --bits 3 --outliers 1 --rows 5", "-experts-3bits-1percent-5rows", {3}, {0.01}, {5}),
    ],
)
def test_selection(command: str, suffix: str, bits: set[int], rates: set[float] | None, rows: set[int] | None) -> None:
    found, cases = selection(parse(command.split()))
    cases = list(cases)
    assert found == suffix
    assert {case.bits for case in cases} == bits
    assert rates is None or {case.outlier_rate for case in cases if "trellis" not in case.path} == rates
    assert rows is None or {case.m for case in cases} == rows
    assert {case.path.endswith("experts") for case in cases} == {"--experts" in command}


@pytest.mark.parametrize("wrong", [["--rows", "0"], ["--outliers", "101"], ["--outliers", "-1"], ["--jobs", "no"]])
def test_refuses_numbers_out_of_range(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(wrong)
    assert f"argument {wrong[0]}: invalid" in capsys.readouterr().err


@pytest.mark.interpreter
def test_once_launches_every_product(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [case for case in all_cases(((64, 256),), (3,), (0.0, 0.05), (1, 2, 129)) if "trellis" not in case.path]
    launched = []

    def watched(case: Case) -> Callable:
        return lambda x, weight: launched.append((case, tuple(ssqr_matmul(x, weight).shape), weight.entries is None))

    monkeypatch.setattr("vllm_latq.kernels.bench.bench.product", watched)
    launch_once(cases, CPU)
    assert launched == [(case, (case.m, 64), not case.outlier_rate) for case in cases]
    assert capsys.readouterr().out.splitlines() == [str(case) for case in cases]


@pytest.mark.parametrize("others", ["--minutes 1", "--jobs 2", "--out x.json", "--experts"])
def test_once_refuses_what_it_does_not_take(capsys: pytest.CaptureFixture[str], others: str) -> None:
    with pytest.raises(SystemExit):
        parse(["--once", *others.split()])
    assert others.split()[0] in capsys.readouterr().err


def test_results_are_json_without_facts(tmp_path: Path) -> None:
    case = Case(64, 256, 4, 0.01, 1, "simt")
    result = Result(case, "simt", 0.001234567, 100, Timing(9.0, 8.0, 10.0), reason='a "null" ]')
    write_json(tmp_path / "a.json", {}, [result, result])
    write_json(tmp_path / "b.json", {"device": "null"}, [])
    first = {"error": 0.0012346, "bytes": 100, "kernel": "simt", "reason": 'a "null" ]', "speedup": None}
    found = json.loads((tmp_path / "a.json").read_text())
    assert list(found) == ["results"]
    assert len(found["results"]) == 2
    assert first.items() <= found["results"][0].items()
    assert json.loads((tmp_path / "b.json").read_text()) == {"device": "null", "results": []}


def test_some_outliers_are_always_read() -> None:
    """Any valid entry reads some outliers at a time, whatever it is asked to serve."""
    for rows, gathers, slots in product(REGIMES, (8, 16, 32, 64), (1, 16)):
        entry = replace(AMPERE[0], max_rows=rows, gathers=gathers, slots=slots)
        for m, ranges, transposed in product((1, 2, rows), (1, 2, 4, 8), (False, True)):
            assert 1 <= entry.slots_for(max(1, entry.outlier_rows(m, ranges)), transposed, ranges) <= 16


def test_a_peer_without_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_peer").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    found = {"kernel": ("a_peer", "a-package", (4,)), "other": ("not_there", "other", (4,))}
    monkeypatch.setattr(peers, "PEERS", found | {"torch": ("torch", "torch", (2,))})
    assert peers.versions() == {"a-package": "unknown", "torch": importlib.metadata.version("torch")}
    assert peers.installed() == {"kernel": (4,), "torch": (2,)}


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rounded_weights_of_peers(bits: int) -> None:
    dense = torch.randn(3, 256, generator=torch.Generator().manual_seed(bits))
    weight = peers.rounded(dense, bits, 128)
    scales = weight.scales.float().repeat_interleave(128, 1)
    assert weight.scales.shape == (3, 2)
    assert int(weight.codes.max()) < 1 << bits
    assert torch.equal(weight.dense, (weight.codes.float() - (1 << (bits - 1))) * scales)
    inside = dense < ((1 << (bits - 1)) - 1) * scales
    assert ((weight.dense - dense).abs() <= 0.51 * scales)[inside].all()


@pytest.mark.parametrize("bits", [3, 4])
def test_humming_is_given_a_checkpoint_s_tensors(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Stand-ins for its functions, which need a GPU, take the order of bits of its `pack_weight.cuh`."""

    class Schema:
        def __init__(self, b_dtype: str, weight_scale_group_size: int) -> None:
            assert (b_dtype, weight_scale_group_size) == (f"uint{bits}", 128)

        def convert_humming(self, tensors: dict, **sizes: object) -> tuple:
            assert sizes["shape_n_stacks"] == [70]
            assert sizes["shape_k_stacks"] == [256]
            return self, tensors

    def forward(config: str, inputs: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, **_: object):
        digits = (weight[..., None] >> torch.arange(32) & 1).view(70, 256, bits)
        codes = (digits * 2 ** torch.arange(bits)).sum(2) - (1 << (bits - 1))
        return inputs @ (codes * weight_scale.float().repeat_interleave(128, 1)).to(inputs.dtype).T

    parts = {
        "forward": {"humming_forward": forward},
        "schema": {"HummingWeightSchema": Schema},
        "transform": {"prepare_and_transform_humming_tensors": lambda tensors, **_: ("config", tensors)},
    }
    for name, functions in parts.items():
        monkeypatch.setitem(sys.modules, f"humming.{name}", SimpleNamespace(**functions))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=3))
    x, dense = torch.randn(2, 256), torch.randn(70, 256)
    peer = peers.make("humming", dense, bits, 128, 1)
    assert len(peer.products) == 2
    assert peer.bytes == 70 * (256 * bits // 8 + 2 * 2)
    for product_ in peer.products:
        assert relative_error(product_(x), x, peer.reference) < 1e-5


def test_estimates_of_many_tokens_match_an_h200_s_bf16() -> None:
    """The only ones that were measured. The dense path was slower, in smaller chunks and more launches."""
    h200 = GPUS[-1]
    path = Path(peers.__file__).parents[1] / "results" / "nvidia-h200.json"
    checked = 0
    for row in json.loads(path.read_text())["results"]:
        case = row["case"]
        if case["m"] == 512 and row["kernel"] in ("bf16", "prefill"):
            found = estimate(h200, [(case["rows"], case["cols"])], 512, case["bits"], case["outlier_rate"])
            measured, checked = row["timing"]["median"], checked + 1
            if row["kernel"] == "bf16":
                assert found.bf16 == pytest.approx(measured, rel=0.08)
            else:
                assert found.fused <= found.overlapped < found.dense < measured
    assert checked > len(SHAPES)


def test_documentation_has_the_estimates(capsys: pytest.CaptureFixture[str]) -> None:
    assert TENSOR_TFLOPS.keys() == {gpu.name for gpu in GPUS}
    print_many_tokens([])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    stated = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    assert len(rows) == 2 + 6 + 2 + 2
    assert all(row in stated for row in rows if not row.startswith(("| layers", "| tokens", "|---")))


def test_copies_and_summary() -> None:
    assert copies_beyond_cache(10, 100) * 10 >= 300
    assert copies_beyond_cache(10**9, 100) == 2
    assert summary([5.0, 1.0, 3.0, 2.0, 4.0]) == Timing(3.0, 1.4, 4.6)


def test_roofline() -> None:
    assert bytes_per_weight(4, 0.0) == 0.515625
    h200 = GPUS[-1]
    assert least_microseconds(h200, 8192**2, 2.0, 0.0) == pytest.approx(2 * 8192**2 / 4.8e12 * 1e6)
    assert trellis_bytes_per_weight(3) == pytest.approx(0.375 + 0.0003 * 6)
    # 132 multiprocessors of 4 schedulers at 1.98 GHz
    assert h200.instructions_per_second == pytest.approx(132 * 128 * 1.98e9, rel=0.01)
    for gpu in GPUS:
        for bits, needed in CYCLES[gpu.arch].items():
            assert 0 < needed < gpu.budget(bytes_per_weight(bits, 0.0))  # bound by memory on each of them
    lines: list[str] = []
    print_tables(lines.append)
    assert sum(line.startswith("| 8192x8192") for line in lines) == 7  # bf16, three widths, three trellis codes
