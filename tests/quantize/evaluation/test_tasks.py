"""lm-eval through its Python API, on a task of our own (`tasks_folder` in conftest.py)."""

import json
import sys
from functools import partial
from pathlib import Path

import lm_eval.tasks
import pytest

from vllm_latq.errors import ConfigError
from vllm_latq.quantize.evaluation.tasks import run_tasks


@pytest.fixture(autouse=True)
def _no_tasks_but_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing the thousands that lm-eval brings takes it long; test_examples.py does it once."""
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))


def test_a_task_of_ones_own(mini_model: Path, tasks_folder: Path) -> None:
    results = run_tasks(mini_model, ["next_word"], include_path=tasks_folder, device="cpu")
    assert results["next_word"]["acc,none"] == 1.0
    json.dumps(results)


def test_limit_and_pattern(mini_model: Path, tasks_folder: Path) -> None:
    results = run_tasks(mini_model, ["next_w*"], limit=2, include_path=tasks_folder, device="cpu")
    assert list(results) == ["next_word"]
    assert results["next_word"]["sample_len"] == 2


def test_unknown_task(mini_model: Path, tasks_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"task 'next_phrase': expected a task lm-eval knows.*--include-path"):
        run_tasks(mini_model, ["next_word", "next_phrase"], include_path=tasks_folder, device="cpu")


def test_data_that_cannot_be_read(mini_model: Path, tasks_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "next_word.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"tasks next_word: expected data that can be read, found FileNotFoundError"):
        run_tasks(mini_model, ["next_word"], include_path=tasks_folder, device="cpu")


def test_no_tasks_and_no_folder(mini_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tasks: expected at least one task, found none"):
        run_tasks(mini_model, [], device="cpu")
    with pytest.raises(ConfigError, match="limit: expected a positive number, found -1"):
        run_tasks(mini_model, ["next_word"], limit=-1, device="cpu")
    with pytest.raises(ConfigError, match="include_path: expected a folder with task definitions"):
        run_tasks(mini_model, ["next_word"], include_path=tmp_path / "nowhere", device="cpu")


def test_lm_eval_absent(mini_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"the lm-eval harness.*pip install lm-eval"):
        run_tasks(mini_model, ["arc_easy"], device="cpu")
