"""Evaluation on answers of conversations, against independent formulas, and with kept predictions of an original."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.chat import TEMPLATE, talk, with_template, write_lines
from vllm_latq.errors import CheckpointError, ConfigError
from vllm_latq.quantize.evaluation import predictors
from vllm_latq.quantize.evaluation.evaluate import evaluate
from vllm_latq.quantize.evaluation.predictions import TOP_TOKENS
from vllm_latq.quantize.evaluation.reference import read_reference
from vllm_latq.quantize.evaluation.results import described_text
from vllm_latq.quantize.evaluation.windows import read_windows

FLOAT32_TOLERANCE = 1e-5
HOW: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
# Two blocks of the model are unsure: a tenth of the probability is of tokens that are not listed, which count as one.
KEPT_TOLERANCE = 0.1
QUESTIONS = ("Returns what?", "Deprecated since version 3.1: use", "A longer question about the module os and files?")
ANSWERS = ("the list of names.", "the function in the module.", "None", "a path-like object, or a string.")


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> str:
    records = [talk(QUESTIONS[n % 3], ANSWERS[n % 4], QUESTIONS[(n + 1) % 3], ANSWERS[(n + 2) % 4]) for n in range(12)]
    return write_lines(tmp_path_factory.mktemp("talks") / "talks.jsonl", records)


@pytest.fixture(scope="module")
def model(two_blocks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(two_blocks, tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def moved(model: Path, mini_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All four blocks of the model, as if quantizing had added two."""
    return with_template(mini_model, tmp_path_factory.mktemp("moved") / "model")


def all_logprobs(path: Path, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities at the tokens of answers, each conversation by itself, and these tokens."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    windows = read_windows(tokenizer, source, 256)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    rows, tokens = [], []
    for ids, counted, length in zip(windows.tokens, windows.counted, windows.lengths, strict=True):
        with torch.no_grad():
            logits = model(input_ids=ids[None, :length]).logits[0, :-1]
        rows.append(logits.log_softmax(-1)[counted[: length - 1]])
        tokens.append(ids[1:][counted])
    return torch.cat(rows), torch.cat(tokens)


def test_only_answers_are_predicted_and_padding_changes_nothing(model: Path, moved: Path, talks: str) -> None:
    got = evaluate(moved, talks, 256, baseline=model, batch_size=5, answers=2, **HOW)
    q, tokens = all_logprobs(moved, talks)
    p, _ = all_logprobs(model, talks)
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    assert (got.positions, got.on_answers, got.windows, got.through) == (len(tokens), True, 12, "transformers")
    assert got.baseline == str(model)
    assert got.perplexity == pytest.approx(float((-q.gather(1, tokens[:, None]).mean()).exp()), 1e-4)
    assert got.kl == pytest.approx(float(kl.mean()), 1e-4)
    ordered = kl.sort().values
    assert got.kl_median == pytest.approx(float(ordered[(len(kl) + 1) // 2 - 1]), 1e-3)
    assert got.kl_p99 == pytest.approx(float(ordered[-(-99 * len(kl) // 100) - 1]), 1e-3)
    assert got.kl_max == pytest.approx(float(kl.max()), 1e-3)
    assert got.kl_unseen is None
    assert got.top1_agreement == pytest.approx(float((q.argmax(-1) == p.argmax(-1)).float().mean()))
    assert got.answers is not None
    assert got.answers[0]["prompt"].endswith("<|assistant|>\n")


def test_a_reference_stands_for_the_original(model: Path, moved: Path, talks: str, tmp_path: Path) -> None:
    """It is the same whether the original was a baseline or was run alone, and little is lost."""
    exact = evaluate(moved, talks, 256, baseline=model, save_reference=tmp_path / "beside", **HOW)
    alone = evaluate(model, talks, 256, save_reference=tmp_path / "alone", batch_size=3, **HOW)
    assert alone.kl is None
    for name in ("beside", "alone"):
        got = evaluate(moved, talks, 256, reference=tmp_path / name, **HOW)
        assert got.baseline == str(model)
        assert (got.perplexity, got.positions) == (exact.perplexity, exact.positions)
        assert got.baseline_perplexity == pytest.approx(exact.baseline_perplexity, FLOAT32_TOLERANCE)
        assert got.top1_agreement == exact.top1_agreement
        assert got.kl_unseen is not None
        assert 0 < got.kl_unseen < 0.2
        assert exact.kl is not None
        assert got.kl is not None
        assert (1 - KEPT_TOLERANCE) * exact.kl < got.kl <= exact.kl
    size = (tmp_path / "alone").stat().st_size
    assert size == pytest.approx(exact.positions * 8 * (TOP_TOKENS + 1), rel=0.1)


def test_a_reference_of_something_else_is_refused(model: Path, mini_model: Path, talks: str, tmp_path: Path) -> None:
    reference, other = tmp_path / "reference", tmp_path / "other.jsonl"
    evaluate(model, talks, 256, save_reference=reference, **HOW)
    other.write_text(Path(talks).read_text().replace("names", "words"))
    template = with_template(mini_model, tmp_path / "template", TEMPLATE.replace("<|", "["))
    (tmp_path / "text").write_text("no reference")
    for changes, message in (
        ({"source": str(other)}, "expected the text of the reference, talks.jsonl, found other.jsonl"),
        ({"max_windows": 3}, "expected the 12 windows of .* of the reference, found 3 of"),
        ({"model_path": template}, "expected the tokens of the reference's tokenizer|windows of .* of the reference"),
        ({"reference": tmp_path / "nowhere"}, "expected a file of `latq eval --save-reference`, found no such file"),
        ({"reference": tmp_path / "text"}, "expected a valid safetensors file"),
        ({"reference": model / "model.safetensors"}, "expected a reference of version 1, found another file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            evaluate(**{"model_path": model, "source": talks, "seq_len": 256, "reference": reference, **HOW, **changes})
    for changes in ({"baseline": model}, {"save_reference": "x"}):
        with pytest.raises(ConfigError, match="reference: expected none beside a"):
            evaluate(model, talks, 256, reference=reference, **HOW, **changes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere/reference", "expected a directory that can be written to, found no such directory .*nowhere"),
        ("folder", "expected a directory that can be written to, found is a directory"),
        ("..", "expected a directory that can be written to, found is a directory"),
    ],
)
def test_a_reference_that_cannot_be_written_is_refused_before_the_evaluation(
    name: str, message: str, model: Path, talks: str, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    events: list[Any] = []
    with pytest.raises(CheckpointError, match=message):
        evaluate(model, talks, 256, save_reference=tmp_path / name, on_event=events.append, **HOW)
    assert not events
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_evaluation_that_fails_leaves_no_reference(model: Path, talks: str, tmp_path: Path) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate(model, talks, 256, save_reference=tmp_path / "reference", engine=failing, **HOW)
    assert not list(tmp_path.iterdir())


def test_a_damaged_reference_is_refused(model: Path, talks: str, tmp_path: Path) -> None:
    path, damaged = tmp_path / "reference", tmp_path / "damaged"
    evaluate(model, talks, 256, save_reference=path, **HOW)
    with safe_open(path, "pt") as file:
        metadata, columns = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    ids, logprobs, rest, targets = (columns[name] for name in ("ids", "logprobs", "rest", "targets"))
    windows, text = read_windows(AutoTokenizer.from_pretrained(model), talks, 256), described_text(talks)
    few = {"ids": ids[:, :0], "logprobs": logprobs[:, :0]}
    for changes, message in (
        ({"ids": ids - ids[0, 0] - 1}, "expected token ids below 2048"),
        ({"ids": ids + 2048}, "expected token ids below 2048"),
        ({"ids": ids[:, 1:]}, "expected token ids below 2048, with a log-probability each"),
        (few, r"expected `ids` of torch.int32, of 2 dimensions, not empty, found torch.int32 \[\d+, 0\]"),
        ({"ids": ids[:, 0]}, "expected `ids` of torch.int32, of 2 dimensions"),
        ({"ids": ids.float()}, "expected `ids` of torch.int32, .* found torch.float32"),
        ({"logprobs": logprobs.int()}, "expected `logprobs` of torch.float32, .* found torch.int32"),
        ({"rest": rest[:, None].expand(-1, 7)}, r"expected `rest` of torch.float32, of 1 dimensions, .* \[\d+, 7\]"),
        ({"targets": targets[:-1]}, r"expected \d+ predictions, found another number"),
        ({"more": targets + 1}, "expected the columns ids, logprobs, rest, targets, found .*more"),
        ({"logprobs": logprobs * torch.nan}, "expected log-probabilities up to 0"),
        ({"targets": targets * torch.nan}, "expected log-probabilities up to 0"),
        ({"targets": -targets}, "expected log-probabilities up to 0"),
        ({"rest": rest + torch.inf}, "probabilities `rest` from 0 to 1"),
    ):
        save_file({name: one.contiguous() for name, one in (columns | changes).items()}, damaged, metadata=metadata)
        with pytest.raises(CheckpointError, match=message):
            read_reference(damaged, text, windows, 2048)
    # A token that the original rules out has the log-probability -inf.
    save_file(columns | {"targets": targets - torch.inf}, damaged, metadata=metadata)
    assert read_reference(damaged, text, windows, 2048)[1].targets.isinf().all()


class TransformersEngine:
    """An engine that lists the likeliest tokens, as vLLM does, of a model that transformers runs."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def prompt_logprobs(self, prompts: list[list[int]], top: int) -> Any:
        for prompt in prompts:
            ids = torch.tensor(prompt)
            with torch.no_grad():
                logprobs = self.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
            found = logprobs.topk(top)
            yield found.indices, found.values, logprobs.gather(1, ids[1:, None])[:, 0]


@pytest.mark.parametrize("whole", [True, False])
def test_an_engine_may_list_all_tokens_or_the_likeliest(
    whole: bool, model: Path, moved: Path, talks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The baseline runs first, and its likeliest tokens are kept."""
    if not whole:
        monkeypatch.setattr(predictors, "WHOLE_VOCABULARY", 1)
    asked = []

    def make(longest: int, top: int) -> TransformersEngine:
        asked.append((longest, top))
        return TransformersEngine(moved)

    got = evaluate(moved, talks, 256, baseline=model, engine=make, **HOW)
    exact = evaluate(moved, talks, 256, baseline=model, **HOW)
    assert asked == [(exact.seq_len, 2048 if whole else TOP_TOKENS)]
    assert got.through == "vllm"
    assert got.perplexity == pytest.approx(exact.perplexity, FLOAT32_TOLERANCE)
    assert exact.kl is not None
    assert got.kl is not None
    assert (1 - (KEPT_TOLERANCE if whole else 4 * KEPT_TOLERANCE)) * exact.kl < got.kl < exact.kl
