"""Evaluation against independent formulas, and a clear error for every unusable model, text or option."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from vllm_latq.errors import CalibrationError, CheckpointError, ConfigError, NumericalError
from vllm_latq.quantize.calibration.text import KNOWN_DATASETS, Dataset
from vllm_latq.quantize.calibration.text import evaluation_text as read_evaluation_text
from vllm_latq.quantize.evaluation.evaluate import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    Evaluation,
    Options,
    evaluate,
)

# Sums over some hundred positions in float32 here, float64 there.
FLOAT32_TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """About 700 tokens of the evaluation text."""
    text = (Path(__file__).parents[2] / "data" / "evaluation.txt").read_text()[:2000]
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def moved_model(mini_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with seeded noise on one projection."""
    return _copy_with(mini_model, tmp_path_factory.mktemp("moved") / "model", noise=0.02)


def _copy_with(model: Path, folder: Path, noise: float) -> Path:
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    generator = torch.Generator().manual_seed(0)
    tensors[name] = tensors[name] + (noise * torch.randn(tensors[name].shape, generator=generator)).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_perplexity_is_the_models_own_loss(mini_model: Path, short_text: str) -> None:
    """GPTQ's protocol, written out: transformers' mean loss per window, averaged over the windows."""
    got = evaluate(mini_model, short_text, seq_len=100, dtype="float32", device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(mini_model)
    model = AutoModelForCausalLM.from_pretrained(mini_model, dtype=torch.float32)
    ids = tokenizer(Path(short_text).read_text(), return_tensors="pt").input_ids[0]
    losses = []
    for window in ids.split(100)[: len(ids) // 100]:
        with torch.no_grad():
            losses.append(model(input_ids=window[None], labels=window[None]).loss)
    assert got.perplexity == pytest.approx(torch.stack(losses).mean().exp().item(), FLOAT32_TOLERANCE)
    assert (got.windows, got.seq_len, got.tokens) == (len(losses), 100, 100 * len(losses))
    assert got.kl is None
    assert got.top1_agreement is None
    assert got.seconds > 0
    assert got.tokens_per_second == pytest.approx(got.tokens / got.seconds)


def test_against_itself_nothing_moved(mini_model: Path, short_text: str) -> None:
    got = evaluate(mini_model, short_text, seq_len=64, baseline=mini_model, device="cpu")
    assert got.kl == 0.0
    assert got.top1_agreement == 1.0
    assert got.baseline_perplexity == got.perplexity
    assert got.answers is None


def test_both_models_continue_distant_prompts(mini_model: Path, moved_model: Path, short_text: str) -> None:
    """The continuations are transformers' own, of the beginnings of windows that are far apart."""
    events: list[Mapping[str, Any]] = []
    how = {"dtype": "float32", "device": "cpu", "answers": 2, "max_windows": 4, "batch_size": 3}
    got = evaluate(moved_model, short_text, 64, baseline=mini_model, on_event=events.append, **how)
    tokenizer = AutoTokenizer.from_pretrained(mini_model)
    ids = tokenizer(Path(short_text).read_text(), return_tensors="pt").input_ids[0]
    assert got.answers is not None
    for answer, start in zip(got.answers, (0, 128), strict=True):
        prompt = ids[start : start + PROMPT_TOKENS]
        assert answer["prompt"] == tokenizer.decode(prompt)
        for name, path in (("model", moved_model), ("baseline", mini_model)):
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            continued = model.generate(prompt[None], max_new_tokens=ANSWER_TOKENS, do_sample=False)[0]
            assert answer[name] == tokenizer.decode(continued[PROMPT_TOKENS:], skip_special_tokens=True)
    assert [(event["stage"], event["done"], event["parts"]) for event in events] == [
        ("evaluating", 0, 4),
        ("evaluating", 3, 4),
        ("evaluating", 4, 4),
        ("answering", 0, 2),
        ("answering", 1, 2),
    ]


def test_perplexity_of_the_baseline(mini_model: Path, moved_model: Path, short_text: str) -> None:
    alone = evaluate(mini_model, short_text, 64, dtype="float32", device="cpu")
    beside = evaluate(moved_model, short_text, 64, baseline=mini_model, dtype="float32", device="cpu")
    assert beside.baseline_perplexity == pytest.approx(alone.perplexity, FLOAT32_TOLERANCE)
    assert alone.baseline_perplexity is None


@pytest.mark.parametrize(("option", "least"), [("seq_len", 2), ("batch_size", 1), ("max_windows", 1), ("answers", 0)])
def test_options_have_a_least_value(option: str, least: int) -> None:
    with pytest.raises(ConfigError, match=f"{option}: expected at least {least}, found {least - 1}"):
        Options(**{option: least - 1})


@pytest.mark.parametrize("name", ["ssqr", "hptq"])
def test_checkpoint_evaluates_like_its_dequantized_weights(
    name: str, mini_model: Path, short_text: str, request: pytest.FixtureRequest
) -> None:
    pair = request.getfixturevalue(f"{name}_pair")
    latq = evaluate(pair.latq, short_text, seq_len=64, baseline=mini_model, device="cpu")
    dense = evaluate(pair.dense, short_text, seq_len=64, baseline=mini_model, device="cpu")
    assert latq.kl is not None
    assert latq.kl > 0
    assert (latq.perplexity, latq.kl, latq.top1_agreement) == (dense.perplexity, dense.kl, dense.top1_agreement)


def test_kl_of_a_moved_model(mini_model: Path, moved_model: Path, short_text: str) -> None:
    small = evaluate(moved_model, short_text, 64, baseline=mini_model, dtype="float32", device="cpu")
    swapped = evaluate(mini_model, short_text, 64, baseline=moved_model, dtype="float32", device="cpu")
    assert small.kl is not None
    assert small.top1_agreement is not None
    assert small.kl > 0.001
    assert 0 < small.top1_agreement < 1
    # KL has a direction, agreement has none.
    assert swapped.kl != small.kl
    assert swapped.top1_agreement == small.top1_agreement


def test_batching_changes_nothing(mini_model: Path, moved_model: Path, short_text: str) -> None:
    one = evaluate(moved_model, short_text, 64, baseline=mini_model, dtype="float32", batch_size=1, device="cpu")
    four = evaluate(moved_model, short_text, 64, baseline=mini_model, dtype="float32", batch_size=4, device="cpu")
    assert four.tokens == one.tokens
    assert four.perplexity == pytest.approx(one.perplexity, FLOAT32_TOLERANCE)
    assert four.kl == pytest.approx(one.kl, FLOAT32_TOLERANCE * 100)


def test_text_shorter_than_a_window(mini_model: Path, tmp_path: Path) -> None:
    source = tmp_path / "line.txt"
    source.write_text("The module provides a function that returns a list of names.")
    with pytest.warns(UserWarning, match=r"has \d+ tokens, fewer than one window of 512"):
        got = evaluate(mini_model, str(source), seq_len=512, device="cpu")
    assert got.windows == 1
    assert got.tokens == got.seq_len < 512


def test_seq_len_is_clamped_to_the_positions(mini_model: Path, evaluation_text: Path) -> None:
    with pytest.warns(UserWarning, match="has 2048 positions: evaluating with seq_len 2048, not 4096"):
        got = evaluate(mini_model, str(evaluation_text), seq_len=4096, max_windows=1, device="cpu")
    assert (got.seq_len, got.windows) == (2048, 1)


def test_to_dict_has_the_promised_keys() -> None:
    result = Evaluation(40.0, 512, 2, 256, 0.5, 1024.0, kl=0.01, top1_agreement=0.98).to_dict()
    assert {"perplexity", "kl", "top1_agreement", "tokens", "tokens_per_second"} <= result.keys()
    assert result["kl"] == 0.01


def test_nan_logits_name_the_window(mini_model: Path, tmp_path: Path, short_text: str) -> None:
    broken = _copy_with(mini_model, tmp_path / "broken", noise=0.0)
    tensors = load_file(broken / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(mini_model)
    ids = tokenizer(Path(short_text).read_text()).input_ids
    # A token that first occurs in window 2 has a NaN embedding.
    poisoned = next(token for token in ids[128:192] if token not in ids[:128])
    embedding = tensors["model.embed_tokens.weight"].clone()
    separate = tensors["model.embed_tokens.weight"]
    embedding[poisoned] = float("nan")
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = embedding, separate
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    config = (broken / "config.json").read_text()
    (broken / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    for batch_size in (1, 2):
        with pytest.raises(NumericalError, match=r"broken, window 2: expected finite logits, found \d+ NaN"):
            evaluate(broken, short_text, seq_len=64, device="cpu", batch_size=batch_size)


def test_baseline_with_another_vocabulary(mini_model: Path, tmp_path: Path, short_text: str) -> None:
    other = tmp_path / "other"
    config = Qwen3Config(
        vocab_size=2050,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    Qwen3ForCausalLM(config).save_pretrained(other)
    AutoTokenizer.from_pretrained(mini_model).save_pretrained(other)
    with pytest.raises(CheckpointError, match="expected the baseline's vocabulary of 2050 tokens, found 2048"):
        evaluate(mini_model, short_text, seq_len=64, baseline=other, device="cpu")


def test_tokenizer_of_a_larger_model(mini_model: Path, tmp_path: Path, short_text: str) -> None:
    config = Qwen3Config(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(mini_model).save_pretrained(tmp_path / "small")
    with pytest.raises(CheckpointError, match=r"expected a tokenizer of at most 100 tokens, found token id \d+"):
        evaluate(tmp_path / "small", short_text, seq_len=64, device="cpu")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"seq_len": 1}, "seq_len: expected at least 2, found 1"),
        ({"batch_size": 0}, "batch_size: expected at least 1, found 0"),
        ({"max_windows": 0}, "max_windows: expected at least 1, found 0"),
        ({"dtype": "float31"}, "dtype: expected auto, float32"),
        ({"device": "abacus"}, "device: expected a device torch can use, found 'abacus'"),
    ],
)
def test_options_out_of_range(mini_model: Path, short_text: str, option: dict[str, int | str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(mini_model, short_text, **{"device": "cpu", **option})


def test_a_missing_model_is_reported_before_a_missing_text(mini_model: Path, tmp_path: Path) -> None:
    nowhere, no_text = tmp_path / "nowhere", str(tmp_path / "missing.txt")
    with pytest.raises(CheckpointError, match="nowhere: expected a model directory"):
        evaluate(nowhere, no_text, device="cpu")
    with pytest.raises(CheckpointError, match="nowhere: expected a model directory"):
        evaluate(mini_model, no_text, baseline=nowhere, device="cpu")


def test_unusable_text(mini_model: Path, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="expected an existing text file"):
        evaluate(mini_model, str(tmp_path / "missing.txt"), device="cpu")
    one_token = tmp_path / "one.txt"
    one_token.write_text("a")
    with pytest.raises(CalibrationError, match="expected at least 2 tokens, found 1"):
        evaluate(mini_model, str(one_token), device="cpu")


def test_dataset_folder_gives_its_test_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(f'{{"text": "{split} one"}}\n{{"text": "{split} two"}}\n')
    assert read_evaluation_text(str(tmp_path)) == "test one\n\ntest two"


def test_limits_of_a_known_dataset(
    mini_model: Path, evaluation_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C4 is read up to a number of documents and evaluated up to a number of windows."""
    documents = evaluation_text.read_text().split("\n\n\n")[:50]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    limited = Dataset(
        str(tmp_path), evaluation_split="validation", separator=" ", evaluation_rows=40, evaluation_windows=3
    )
    monkeypatch.setitem(KNOWN_DATASETS, "c4", limited)
    assert read_evaluation_text("c4") == " ".join(documents[:40])
    assert evaluate(mini_model, "c4", seq_len=64, device="cpu").windows == 3
    assert evaluate(mini_model, "c4", seq_len=64, device="cpu", max_windows=5).windows == 5
