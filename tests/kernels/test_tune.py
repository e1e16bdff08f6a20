"""The search for launch configurations without a GPU, on a tiny layer in the interpreter.

Timers here return made-up numbers: what is tested is what happens to them.
"""

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.made_up_times import Watched, five_microseconds
from vllm_latq.kernels import configs
from vllm_latq.kernels.bench.bench import main
from vllm_latq.kernels.bench.cases import Case, layer_of, make_layer
from vllm_latq.kernels.bench.timing import Timing
from vllm_latq.kernels.bench.tune import Search, descend, mean_time, neighbours, predicted, tune
from vllm_latq.kernels.configs import AMPERE, SIMT, TRELLIS, DecodeConfig, TrellisConfig
from vllm_latq.kernels.errors import KernelInputError

pytestmark = pytest.mark.usefixtures("truncated_outputs")

CPU = torch.device("cpu")


def test_tune_searches_what_decides_one_and_two_rows_only_there() -> None:
    assert any(other.gathers != AMPERE[0].gathers for other in neighbours(AMPERE[0]))
    assert not any(other.gathers != entry.gathers for entry in (AMPERE[-1], SIMT) for other in neighbours(entry))


def test_tune_refuses_a_selection(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tune", "8", "--bits", "3", "--rows", "1"])
    assert "leave out --bits --rows" in capsys.readouterr().err


def test_descent_finds_the_minimum_of_its_neighbourhood() -> None:
    def cost(config: DecodeConfig) -> float:
        return 100 + abs(config.num_warps - 4) + abs(config.stages - 5) * 3 + (config.block_n == 128)

    best, lowest = descend(AMPERE[0], lambda configs: [cost(config) for config in configs])
    assert lowest <= min(cost(other) for other in neighbours(best)) / 0.99
    assert best.stages == 5
    assert all(other != best for other in neighbours(best))


def small_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave to the search one small layer and few choices."""
    choices, trellis = {"num_warps": (2, 4), "stages": (3, 4), "block_n": (64, 128)}, {"stages": (3, 4)}
    for name, value in {
        "SHAPES": ((64, 256),),
        "BITS": (3,),
        "CHOICES": choices,
        "TRELLIS_CHOICES": trellis,
        "cache_bytes": lambda _: 1,
    }.items():
        monkeypatch.setattr(f"vllm_latq.kernels.bench.tune.{name}", value)


def as_if_timed(launches: list[partial], simt: float = 1.0) -> Timing:
    """Stand in for a timer: most stages, two warps and 64 features are fastest, and four warps do not run."""
    config = launches[0].args[2]
    if isinstance(config, TrellisConfig):
        return Timing(config.stages, 0, 0)
    if config.num_warps == 4:
        raise RuntimeError("as if this did not fit")
    five_microseconds(launches)
    factor = simt if config.kernel == "simt" else 1.0
    return Timing(factor * (20 - config.stages * config.num_warps + config.block_n / 128), 0, 0)


@pytest.mark.interpreter
@pytest.mark.parametrize("simt", [1.0, 0.4])
def test_tune_writes_the_fastest_that_runs(simt: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fastest row of a regime is written, never one that does not run; the SIMT kernel's only where it wins."""
    small_search(monkeypatch)
    path, lines = tmp_path / "tuned.json", []
    sixteen = next(row for row in AMPERE if row.max_rows == 16)
    others = [asdict(row) for row in (replace(SIMT, max_rows=1), sixteen, AMPERE[0])]
    path.write_text(json.dumps({"sm_86": others[:1], "": others}))
    with Watched() as compilers:
        tune(CPU, partial(as_if_timed, simt=simt), compilers, (8,), lines.append, path=path)
    tried = [int(line.split()[-2]) for line in lines if line.endswith(" tried")]
    assert len(compilers.shapes) == 2 * tried[0] + tried[1] + 2 * tried[2]  # one row and eight, but of the SIMT kernel
    decode, alone, found = [line for line in lines if not line.startswith("#")]
    assert found == f"{TRELLIS!r},  # 3.0 us at 1 and 8 rows, from 3.0; 2 tried"
    for line, kernel, us in ((decode, "tensor_core", 12.5), (alone, "simt", 12.5 * simt)):
        found, _, remark = line.partition(",  # ")
        best = eval(found, {"DecodeConfig": DecodeConfig})
        assert (best.kernel, best.num_warps, best.stages, best.block_n) == (kernel, 2, 4, 64)
        assert remark.startswith(f"{us:.1f} us at {'1 and 8' if kernel == 'tensor_core' else '1'} rows, from ")
    written = json.loads(path.read_text())
    assert written["sm_86"] == others[:1]
    rows = [DecodeConfig(**row) for row in written[""]]
    assert [(row.kernel, row.max_rows) for row in rows] == [
        *([("simt", 1)] if simt < 1 else []),
        ("tensor_core", 8),
        ("tensor_core", 16),  # another regime's: kept
    ]
    timed = rows[:-1]
    assert all(row.min_group == 128 and torch.__version__ in row.source for row in timed)
    monkeypatch.setattr(configs, "TUNED", path)
    tables = [configs.table_of.__wrapped__(arch) for arch in ("", "sm_80")]
    assert [row for row in tables[0] if row.max_rows <= 8][: len(timed)] == timed  # before the rows of the table
    assert tables[1] == AMPERE


@pytest.mark.interpreter
def test_tune_ends_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every timing takes five seconds here. The best found so far is written, and each search gets its share."""
    small_search(monkeypatch)
    monkeypatch.setattr("vllm_latq.kernels.bench.tune.available_processes", lambda: 2)
    now = 0

    def timer(launches: list[partial]) -> Timing:
        nonlocal now
        now += 5
        return as_if_timed(launches)

    monkeypatch.setattr("time.monotonic", lambda: now)
    path, lines = tmp_path / "tuned.json", []
    with Watched() as compilers:
        tune(CPU, timer, compilers, (8, 16), lines.append, minutes=1, path=path)
    assert 30 < now <= 60
    assert sum("out of time" in line for line in lines) >= 1
    assert {row["max_rows"] for row in json.loads(path.read_text())[""]} >= {8, 16}
    lines.clear()
    with Watched() as compilers:
        tune(CPU, timer, compilers, (8,), lines.append, minutes=-1, path=tmp_path / "none.json")
    assert not (tmp_path / "none.json").exists()


def test_tune_wants_a_file_that_it_can_write(tmp_path: Path) -> None:
    with pytest.raises(KernelInputError, match="Name another with --out"):
        tune(CPU, five_microseconds, None, path=tmp_path / "missing" / "tuned.json")


def test_search_orders_by_residency() -> None:
    """Two stages let more programs run on sm_86, so they are tried before three; wide tiles would spill."""
    now = replace(AMPERE[0], num_warps=2, stages=3)
    assert predicted(replace(now, stages=2), "sm_86") < predicted(now, "sm_86")
    assert predicted(replace(AMPERE[-1], num_warps=1), "sm_80") > predicted(AMPERE[-1], "sm_80")


@pytest.mark.interpreter
@pytest.mark.parametrize("path", ["tensor_core", "spread"])
def test_the_kernel_that_spreads_outliers_is_taken_only_where_they_are_laid_out(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an AMD GPU they are not. Its row would be faster by the times of this test."""
    monkeypatch.setattr("vllm_latq.kernels.bench.tune.CHOICES", {"spread": (False, True)})
    case = Case(64, 256, 3, 0.02, 1, path)
    layer = layer_of(case, CPU)
    with Watched() as compilers:
        search = Search(
            [(case, layer, [layer.weight] * 2)],
            lambda launches: Timing(1 if launches[0].args[2].spread else 2, 0, 0),
            compilers,
            lambda _: None,
        )
        best, _, _ = search.run(AMPERE[0], (1,))
    assert best.spread == (path == "spread")


@pytest.mark.interpreter
def test_a_wrong_configuration_is_not_timed() -> None:
    case = Case(64, 256, 3, 0.0, 1, "tensor_core")
    layer = make_layer(case, CPU)
    weights = [layer.weight, layer.weight]
    assert mean_time(AMPERE[0], (3, 1), [(case, layer, weights)], five_microseconds) == pytest.approx(5.0)
    layer.weight.words[0, 0, 0, 3] ^= 0x7FFFFFFF
    assert mean_time(AMPERE[0], (3, 1), [(case, layer, weights)], five_microseconds) == float("inf")
