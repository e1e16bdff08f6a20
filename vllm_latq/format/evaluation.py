"""Parse the results of `latq eval` that are kept beside a checkpoint. FORMAT.md section 7.

Invariant: names are strings and numbers are finite numbers or None, whatever the file contains.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_latq.errors import CheckpointError
from vllm_latq.format.files import read_json
from vllm_latq.format.reader import EVALUATION_FILE
from vllm_latq.format.report import finite_number

# The numbers of a run.
NUMBERS = (
    "windows", "seq_len", "positions", "perplexity", "baseline_perplexity", "kl", "kl_median", "kl_p99", "kl_max",
    "kl_unseen", "top1_agreement",
)  # fmt: skip
_ANSWER = ("prompt", "baseline", "model")
_HINT = "Remove the file: it only holds results of earlier `latq eval`."


@dataclass(frozen=True)
class EvaluationRun:
    """The results of one `latq eval`; empty or None where nothing was measured.

    Attributes:
        date: time of the run, ISO 8601.
        text: name of the text.
        text_sha256: SHA-256 of its file.
        windows, seq_len: number of windows, and tokens of each.
        positions: number of predictions.
        on_answers: whether only tokens of answers in conversations are predicted.
        through: the program that ran the checkpoint, "transformers" or "vllm".
        perplexity, baseline_perplexity: of the checkpoint and of the original model.
        kl: mean KL(original || checkpoint) of the next-token distributions, nats.
        kl_median, kl_p99, kl_max: median, 99th percentile and largest KL of a position.
        kl_unseen: mean probability of tokens that were not compared one by one, so that `kl` is a lower bound.
        top1_agreement: share of positions where both rank the same token first.
        answers: (prompt, answer of the original, answer of the checkpoint) of some prompts.
        tasks: metric -> value of each lm-eval task.
    """

    date: str = ""
    text: str = ""
    text_sha256: str = ""
    windows: float | None = None
    seq_len: float | None = None
    positions: float | None = None
    on_answers: bool = False
    through: str = ""
    perplexity: float | None = None
    baseline_perplexity: float | None = None
    kl: float | None = None
    kl_median: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    kl_unseen: float | None = None
    top1_agreement: float | None = None
    answers: tuple[tuple[str, str, str], ...] = ()
    tasks: Mapping[str, Mapping[str, float]] | None = None

    @classmethod
    def from_dict(cls, run: Mapping[str, Any], where: str) -> "EvaluationRun":
        """Parse one run and ignore unknown keys; raise CheckpointError for wrong types."""
        text = _object(run.get("text"), f"{where}.text")
        answers = run.get("answers") or []
        if not isinstance(answers, list):
            raise CheckpointError(f"{where}.answers", "a list", type(answers).__name__, _HINT)
        answers = [_object(answer, f"{where}.answers") for answer in answers]
        return cls(
            _text(run.get("date"), f"{where}.date"),
            _text(text.get("name"), f"{where}.text.name"),
            _text(text.get("sha256"), f"{where}.text.sha256"),
            on_answers=run.get("on_answers") is True,
            through=_text(run.get("through"), f"{where}.through"),
            **{key: finite_number(run.get(key), f"{where}.{key}", _HINT) for key in NUMBERS},
            answers=tuple(
                (*(_text(answer.get(key), f"{where}.answers.{key}") for key in _ANSWER),)  # type: ignore[misc]
                for answer in answers
            ),
            tasks=_tasks(run.get("tasks"), f"{where}.tasks"),
        )

    @property
    def described(self) -> str:
        """The text, with what was predicted of it and the program that ran the checkpoint."""
        answers, through = ", answers" if self.on_answers else "", ", through vLLM" if self.through == "vllm" else ""
        return f"{self.text}{answers}{through}"


def kept_runs(checkpoint: str | Path) -> list[dict[str, Any]]:
    """Return the runs that are kept beside a checkpoint as JSON has them, the oldest first.

    Raises:
        CheckpointError: the file is not a list of objects.
    """
    path = Path(checkpoint) / EVALUATION_FILE
    if not path.exists():
        return []
    runs = read_json(path, _HINT).get("runs")
    if not isinstance(runs, list):
        raise CheckpointError(f"{path}: runs", "a list of objects", type(runs).__name__, _HINT)
    for index, run in enumerate(runs):
        if not isinstance(run, dict):
            raise CheckpointError(f"{path}: runs[{index}]", "an object", type(run).__name__, _HINT)
    return runs


def evaluation_runs(checkpoint: str | Path) -> list[EvaluationRun]:
    """Return the runs that are kept beside a checkpoint, the oldest first; CheckpointError if the file is damaged."""
    where = f"{Path(checkpoint) / EVALUATION_FILE}: runs"
    return [EvaluationRun.from_dict(run, f"{where}[{index}]") for index, run in enumerate(kept_runs(checkpoint))]


def _tasks(value: Any, where: str) -> dict[str, dict[str, float]]:
    """Return the metrics of tasks that are numbers."""
    tasks: dict[str, dict[str, float]] = {}
    for task, metrics in _object(value, where).items():
        numbers = {name: one for name, one in _object(metrics, where).items() if type(one) in (int, float)}
        checked = {name: finite_number(one, f"{where}.{task}.{name}", _HINT) for name, one in numbers.items()}
        tasks[task] = {name: one for name, one in checked.items() if one is not None}
    return tasks


def _object(value: Any, where: str) -> Mapping[str, Any]:
    """Return an object, and null as an empty one."""
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(where, "an object or null", type(value).__name__, _HINT)
    return value or {}


def _text(value: Any, where: str) -> str:
    """Return text, and null as empty text."""
    if value is not None and not isinstance(value, str):
        raise CheckpointError(where, "text or null", type(value).__name__, _HINT)
    return value or ""
