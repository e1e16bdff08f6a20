"""The functions of `vllm_latq`: `quantize`, `evaluate`, `trace` and `export`, each a command of the same name."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_latq import console
from vllm_latq.errors import ConfigError
from vllm_latq.quantize.recipe import Recipe

if TYPE_CHECKING:
    from vllm_latq.integrations.vllm.offline import OfflineEngine
    from vllm_latq.quantize.calibration.trace import Traced
    from vllm_latq.quantize.evaluation.evaluate import Evaluation


def quantize(
    model: str | Path,
    output: str | Path,
    *,
    preset: str | None = None,
    calibration: str | None = None,
    fit: str | None = None,
    device: str | None = None,
    resume: bool = False,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Quantize a model into a checkpoint, and show the progress.

        vllm_latq.quantize("Qwen/Qwen3-8B", "out", bits=3)

    Args:
        model: directory or hub name of the model.
        output: directory to create. It appears complete or not at all.
        preset: "fast", "balanced" (the default) or "best", see `vllm_latq.quantize.recipe.PRESETS`.
        calibration: text file, dataset name or dataset folder, of text or of conversations; None takes the bundled
            text, if the method needs any.
        fit: memory of the GPU that is to serve the model, such as "24GiB", which decides the bits, in place of `bits`.
        device: torch device; None takes CUDA where there is one.
        resume: continue an interrupted run.
        on_event: called with each event, a plain dict, in place of the progress display.
        options: fields of `vllm_latq.quantize.recipe.Recipe`, such as `method`, `bits`, `ignore`. If `group_size` or
            `seq_len` is left out and its default does not suit the model, a value that does is chosen, with a warning.

    Returns:
        The report, as stored in the checkpoint.

    Raises:
        LatqError: anything wrong with options, model, calibration text or output.
    """
    from vllm_latq.quantize.fit import fitted
    from vllm_latq.quantize.model.loading import model_directory
    from vllm_latq.quantize.pipeline import quantize_checkpoint

    recipe = Recipe.of(preset, options)
    if fit is not None:
        if "bits" in options:
            raise ConfigError("fit", "no bits beside it", repr(options["bits"]), "Leave out one of them.")
        recipe = fitted(recipe, model, fit, None, None)
    source = model_directory(model)
    header = console.quantize_header(recipe.to_dict(), str(model), str(output), calibration, device)
    shown = console.ProgressDisplay(header=header) if on_event is None else nullcontext(on_event)
    with shown as listener:
        return quantize_checkpoint(
            recipe, source, output, calibration=calibration, device=device, resume=resume, on_event=listener
        )


def evaluate(
    model: str | Path,
    source: str,
    *,
    baseline: str | Path | None = None,
    through: str = "transformers",
    engine_args: Mapping[str, Any] | None = None,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
    **options: Any,
) -> "Evaluation":
    """Measure a model or checkpoint on a text, and show the progress.

        vllm_latq.evaluate("out", "text.txt", baseline="Qwen/Qwen3-8B")

    Args:
        model: directory or hub name.
        source: text file, dataset name or dataset folder, of text or of conversations.
        baseline: the original model, to compare the next-token distributions with.
        through: "transformers", or "vllm" to run the model as it is served. A baseline is run by transformers.
        engine_args: engine arguments of vLLM, such as `tensor_parallel_size`.
        on_event: called with each event, a plain dict, in place of the progress display.
        options: fields of `vllm_latq.quantize.evaluation.evaluate.Options`, such as `seq_len`, `max_windows`, `device`,
            `reference`.

    Raises:
        LatqError: anything wrong with options, models or text.
    """
    from vllm_latq.quantize.evaluation.evaluate import evaluate as measure

    if through not in ("transformers", "vllm"):
        raise ConfigError("through", "transformers or vllm", repr(through))
    if through != "vllm" and engine_args is not None:
        raise ConfigError("engine_args", "none without through='vllm'", repr(engine_args), "Leave them out.")
    engine = _Engines(model, options.get("dtype", "auto"), engine_args) if through == "vllm" else None
    header = [f"{model}: evaluation", f"on {source}" + (f", against {baseline}" if baseline is not None else "")]
    shown = console.ProgressDisplay(header=header) if on_event is None else nullcontext(on_event)
    with shown as listener, engine or nullcontext():
        make = None if engine is None else engine.for_logprobs
        return measure(model, source, baseline=baseline, on_event=listener, engine=make, **options)


def trace(
    model: str | Path,
    output: str | Path,
    *,
    engine_args: Mapping[str, Any] | None = None,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
    **options: Any,
) -> "Traced":
    """Let a model answer prompts by vLLM, and write the conversations for calibration and evaluation.

        vllm_latq.trace("Qwen/Qwen3-8B", "trace.jsonl")

    Args:
        model: directory or hub name of a model with a chat template.
        output: file to create, of JSON lines.
        engine_args: engine arguments of vLLM, such as `tensor_parallel_size`.
        on_event: called with each event, a plain dict, in place of the progress display.
        options: `prompts`, `num`, `max_tokens` and `seed`, see `vllm_latq.quantize.calibration.trace.trace`.

    Raises:
        LatqError: anything wrong with options, model, prompts or output, or no vLLM.
    """
    from vllm_latq.quantize.calibration.trace import trace as generate

    engine = _Engines(model, "auto", engine_args)
    header = [f"{model}: trace", f"-> {output}"]
    shown = console.ProgressDisplay(header=header) if on_event is None else nullcontext(on_event)
    with shown as listener, engine:
        return generate(model, output, engine.for_answers, on_event=listener, **options)


def export(checkpoint: str | Path, output: str | Path, *, to: str = "compressed-tensors") -> None:
    """Write a checkpoint in a format that vLLM and transformers read without this package.

        vllm_latq.export("out", "out-compressed-tensors")

    Args:
        checkpoint: directory of a checkpoint of rtn, gptq, or latq with grid "group", without outliers.
        output: directory to create. It appears complete or not at all.
        to: format, one of `vllm_latq.format.scheme.EXPORT_FORMATS`.

    Raises:
        LatqError: the format does not express the checkpoint, or anything is wrong with checkpoint or output.
    """
    from vllm_latq.quantize.export import export_checkpoint

    export_checkpoint(checkpoint, output, to)


class _Engines:
    """The engine of vLLM that a function needs, made when it is needed and stopped at the end."""

    def __init__(self, model: str | Path, dtype: str, arguments: Mapping[str, Any] | None) -> None:
        self.model, self.dtype, self.arguments = model, dtype, dict(arguments or {})
        self.made: OfflineEngine | None = None

    def for_logprobs(self, longest: int, top: int) -> "OfflineEngine":
        """Return an engine that returns so many log-probabilities of prompts of so many tokens."""
        # A prompt must leave room for a token. Nothing is decoded, so no tokenizer is needed.
        own = {"max_model_len": longest + 1, "max_logprobs": top, "skip_tokenizer_init": True}
        return self._make({**own, "enable_prefix_caching": False})

    def for_answers(self, longest: int) -> "OfflineEngine":
        """Return an engine that generates, in conversations of so many tokens."""
        return self._make({"max_model_len": longest})

    def _make(self, arguments: Mapping[str, Any]) -> "OfflineEngine":
        from vllm_latq.integrations.vllm.offline import OfflineEngine

        self.made = OfflineEngine(self.model, **{"dtype": self.dtype, **arguments, **self.arguments})
        return self.made

    def __enter__(self) -> "_Engines":
        return self

    def __exit__(self, *_: object) -> None:
        if self.made is not None:
            self.made.close()
