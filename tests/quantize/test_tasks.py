"""lm-eval through its Python API, on a task defined here."""

import json
import sys
from pathlib import Path

import pytest

from vllm_latq.errors import ConfigError
from vllm_latq.quantize.tasks import run_tasks

TASK = """
task: next_word
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {data}
output_type: multiple_choice
validation_split: validation
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
"""
# The bundled model knows reStructuredText: what follows "versionadded::" is a version, and so on.
ROWS = [
    {"question": ".. versionadded::", "choices": [" 3.8", " banana"], "answer": 0},
    {"question": ".. seealso", "choices": ["%", "::"], "answer": 1},
    {"question": "Return ``True`` if", "choices": [" xyzzy", " the"], "answer": 1},
    {"question": "import", "choices": [" os", " =="], "answer": 0},
]


@pytest.fixture
def tasks_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    data = tmp_path / "next_word.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "next_word.yaml").write_text(TASK.format(data=data))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return folder


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


def test_no_tasks_and_no_folder(mini_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tasks: expected at least one task, found none"):
        run_tasks(mini_model, [], device="cpu")
    with pytest.raises(ConfigError, match="include_path: expected a folder with task definitions"):
        run_tasks(mini_model, ["next_word"], include_path=tmp_path / "nowhere", device="cpu")


def test_lm_eval_absent(mini_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"the lm-eval harness.*pip install .vllm-latq\[eval\]"):
        run_tasks(mini_model, ["arc_easy"], device="cpu")
