"""lm-eval's tasks on a model or checkpoint, through lm-eval's Python API."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_latq.errors import ConfigError
from vllm_latq.quantize.model.loading import load_model


def run_tasks(
    model_path: str | Path,
    tasks: Sequence[str],
    limit: int | float | None = None,
    include_path: str | Path | None = None,
    batch_size: int = 8,
    device: str | None = None,
    dtype: str = "auto",
) -> dict[str, dict[str, Any]]:
    """Runs tasks of the lm-eval harness, zero-shot.

    Args:
        model_path: a Hugging Face directory or hub name; a checkpoint of this package too.
        tasks: lm-eval task or group names, such as `arc_easy`; patterns (`arc_*`) are expanded.
        limit: documents per task (a fraction if below 1), None for all.
        include_path: a folder with further task definitions (YAML).
        batch_size: requests per forward pass.
        device: torch device; by default CUDA where there is one, else the CPU.
        dtype: see `load_model`.

    Returns:
        lm-eval's results by task: metric name (`acc,none`, ...) to value.

    Raises:
        ConfigError: lm-eval is not installed, a task it does not know, or whose data cannot be read.
        CheckpointError: a model that cannot be loaded.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError("tasks", "the lm-eval harness", f"{error}", "Run pip install lm-eval.") from error
    if not tasks:
        raise ConfigError("tasks", "at least one task", "none")
    if limit is not None and not limit > 0:
        raise ConfigError("limit", "a positive number", f"{limit:g}")
    if batch_size < 1:
        raise ConfigError("batch_size", "at least 1", f"{batch_size}")
    if include_path is not None and not Path(include_path).is_dir():
        raise ConfigError("include_path", "a folder with task definitions", f"no folder {include_path}")
    manager = TaskManager(include_path=str(include_path) if include_path is not None else None)
    names = _known_tasks(tasks, manager)
    model, tokenizer = load_model(model_path, device, dtype)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    # bootstrap_iters=0: the standard errors of some metrics take 100 000 resamplings, minutes on a small machine.
    try:
        output = lm_eval.simple_evaluate(
            model=harness,
            tasks=names,
            num_fewshot=0,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            bootstrap_iters=0,
        )
    except OSError as error:
        expected, hint = "data that can be read", "Check the connection to the hub, or the paths in the task's YAML."
        raise ConfigError(f"tasks {', '.join(names)}", expected, f"{type(error).__name__}: {error}", hint) from error
    results: dict[str, dict[str, Any]] = output["results"]
    return results


def _known_tasks(tasks: Sequence[str], manager: Any) -> list[str]:
    """The tasks the patterns match; each pattern must match at least one."""
    names: list[str] = []
    for pattern in tasks:
        matches = manager.match_tasks([pattern])
        if not matches:
            raise ConfigError(
                f"task {pattern!r}",
                "a task lm-eval knows",
                "none of that name",
                "List them with `lm-eval ls tasks`; give the folder of your own with --include-path.",
            )
        names.extend(matches)
    return names
