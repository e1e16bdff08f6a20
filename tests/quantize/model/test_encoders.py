"""Encoders: walked block by block exactly, quantized but for their poolers and heads, and loaded again exactly."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from helpers.encoders import VOCABULARY, random_encoder
from helpers.walk import walk_blocks
from vllm_latq.errors import CalibrationError, CheckpointError, ConfigError, UnsupportedModelError
from vllm_latq.format.reader import CheckpointReader
from vllm_latq.format.verify import verify
from vllm_latq.quantize.calibration.windows import calibration_samples, load_samples
from vllm_latq.quantize.certificate.certificate import verify_certificate
from vllm_latq.quantize.model.decoder import Decoder
from vllm_latq.quantize.model.loading import load_model
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.plan import plan
from vllm_latq.quantize.recipe import Recipe

BERT = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
BERT_LIKE = {f"encoder.layer.{n}.{leaf}" for n in range(2) for leaf in (*BERT, "intermediate.dense", "output.dense")}
DEBERTA = ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj")
LINEARS = {
    "deberta-v2": {
        f"encoder.layer.{n}.{leaf}"
        for n in range(2)
        for leaf in (*DEBERTA, "attention.output.dense", "intermediate.dense", "output.dense")
    },
    **{"bert": BERT_LIKE, "roberta": BERT_LIKE, "electra": BERT_LIKE},
    "modernbert": {f"layers.{n}.{leaf}" for n in range(2) for leaf in ("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo")},
}
SAMPLES = {"num_samples": 4, "seq_len": 32}
GPTQ = Recipe("gptq", 4, group_size=32, **SAMPLES)
RECIPES = {
    **{"bert": Recipe("ssqr", 3, group_size=32, target="original", **SAMPLES), "roberta": GPTQ, "electra": GPTQ},
    "deberta-v2": Recipe("rtn", 4, group_size=32, **SAMPLES),
    "modernbert": Recipe("hptq", bits=3.5, **SAMPLES),
}
TOKENS = torch.randint(4, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model_type", LINEARS)
def test_quantized_and_loaded_again(
    model_type: str, make_dense_twin: Any, calibration_text: Path, tmp_path: Path
) -> None:
    # DeBERTa attends to relative positions.
    model = random_encoder(tmp_path / "source", model_type, calibration_text, relative_attention=True)
    decoder = Decoder(tmp_path / "source", "cpu")
    final_norm = getattr(model, "final_norm", torch.nn.Identity())
    with torch.no_grad():
        expected = model(TOKENS).last_hidden_state
        (states,) = walk_blocks(decoder, TOKENS, len(TOKENS))
        torch.testing.assert_close(final_norm(states), expected, rtol=0, atol=0)
    recipe = RECIPES[model_type]
    assert {layer["name"] for layer in plan(recipe, decoder.source)["layers"]} == LINEARS[model_type]
    quantize_checkpoint(recipe, decoder.source, tmp_path / "out", calibration=str(calibration_text))
    assert list(verify(tmp_path / "out")) == []
    assert list(verify_certificate(tmp_path / "out", decoder.source, str(calibration_text))) == []
    assert set(CheckpointReader(tmp_path / "out").shapes) == LINEARS[model_type]
    loaded = AutoModel.from_pretrained(tmp_path / "out", dtype=torch.float32)
    dense = AutoModel.from_pretrained(make_dense_twin(tmp_path / "out", tmp_path / "dense"))
    with torch.no_grad():
        got, same = loaded(TOKENS).last_hidden_state, dense(TOKENS).last_hidden_state
    torch.testing.assert_close(got, same, rtol=0, atol=0)
    # States of another random model would differ by twice their energy.
    assert 0 < float((got - expected).square().mean()) < 0.5 * float(expected.square().mean())


@pytest.mark.parametrize("auto", [AutoModelForMaskedLM, AutoModelForSequenceClassification])
def test_heads_stay_as_they_are(auto: Any, make_dense_twin: Any, calibration_text: Path, tmp_path: Path) -> None:
    """The same blocks under a prefix; a head that is loaded with them, or left out and a new pooler put on."""
    random_encoder(tmp_path / "source", "bert", calibration_text, auto)
    planned = plan(GPTQ, tmp_path / "source")
    assert {layer["name"] for layer in planned["layers"]} == {f"bert.{name}" for name in BERT_LIKE}
    left = {entry["name"]: entry["shape"] for entry in planned["unquantized"]}
    if auto is AutoModelForMaskedLM:
        assert left == {"cls.predictions.transform.dense.weight": [64, 64]}
    else:
        assert left == {"bert.pooler.dense.weight": [64, 64], "classifier.weight": [2, 64]}
    quantize_checkpoint(GPTQ, tmp_path / "source", tmp_path / "out", calibration=str(calibration_text))
    make_dense_twin(tmp_path / "out", tmp_path / "dense")
    for kind in (auto, AutoModel):
        loaded, dense = (kind.from_pretrained(tmp_path / name, dtype=torch.float32) for name in ("out", "dense"))
        with torch.no_grad():
            torch.testing.assert_close(loaded(TOKENS)[0], dense(TOKENS)[0], rtol=0, atol=0)


def test_each_window_is_a_text(calibration_text: Path, tmp_path: Path) -> None:
    random_encoder(tmp_path, "bert", calibration_text)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    samples = load_samples(tokenizer, str(calibration_text), 8, 33, special_tokens=True).tokens
    assert samples.shape == (8, 33)
    assert samples.dtype == torch.int64
    assert (samples[:, 0] == tokenizer.cls_token_id).all()
    assert (samples[:, -1] == tokenizer.sep_token_id).all()
    inner = samples[:, 1:-1]
    assert not torch.isin(inner, torch.tensor([tokenizer.cls_token_id, tokenizer.sep_token_id])).any()
    text = tokenizer(calibration_text.read_text(), verbose=False)["input_ids"][1:-1]
    windows = [text[start : start + 31] for start in range(0, len(text) - 30, 31)]
    assert all(window in windows for window in inner.tolist())
    with pytest.raises(CalibrationError, match="seq_len: expected room for text between the special tokens, found 2"):
        load_samples(tokenizer, str(calibration_text), 8, 2, special_tokens=True)


def test_positions_behind_padding_are_counted(calibration_text: Path, tmp_path: Path) -> None:
    """RoBERTa's first position is that behind the padding's."""
    for model_type, positions in (("bert", 130), ("roberta", 129)):
        random_encoder(tmp_path / model_type, model_type, calibration_text)
        decoder = Decoder(tmp_path / model_type, "cpu")
        fitting, longer = (Recipe("rtn", num_samples=1, seq_len=positions + more) for more in (0, 1))
        samples = calibration_samples(decoder, fitting, str(calibration_text)).tokens
        assert samples is not None
        decoder.embed(samples, 1)
        with pytest.raises(ConfigError, match=f"at most {positions}, the positions of the model"):
            calibration_samples(decoder, longer, str(calibration_text))
        with pytest.raises(ConfigError, match=f"at most {positions}, the positions of the model"):
            plan(replace(longer, method="gptq", group_size=32), tmp_path / model_type)


def test_blocks_that_need_each_others_outputs_are_refused(calibration_text: Path, tmp_path: Path) -> None:
    random_encoder(tmp_path, "deberta-v2", calibration_text, conv_kernel_size=3)  # between its first and second block
    with pytest.raises(UnsupportedModelError, match="expected the previous block's output as input"):
        Decoder(tmp_path, "cpu").embed(torch.zeros(1, 8, dtype=torch.int64), 1)


def test_what_asks_for_the_next_token_is_refused(calibration_text: Path, tmp_path: Path) -> None:
    random_encoder(tmp_path, "bert", calibration_text)
    with pytest.raises(UnsupportedModelError, match=r"expected a language model.*found an encoder.*--method ssqr"):
        plan(Recipe("latq", bits=3.0, **SAMPLES), tmp_path)
    with pytest.raises(CheckpointError, match=r"expected a causal language model.*found an encoder"):
        load_model(tmp_path, "cpu")


def test_what_serving_reads_is_copied(calibration_text: Path, tmp_path: Path) -> None:
    """How states are pooled, which vLLM reads from the folders of sentence-transformers."""
    random_encoder(tmp_path / "source", "bert", calibration_text)
    for name in ("modules.json", "sentence_bert_config.json", "vocab.txt", "1_Pooling/config.json"):
        (tmp_path / "source" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "source" / name).write_text("{}")
    (tmp_path / "source" / "1_Pooling" / "model.py").write_text("raise SystemExit")
    quantize_checkpoint(Recipe("rtn", 4, group_size=32), tmp_path / "source", tmp_path / "out")
    copied = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"modules.json", "sentence_bert_config.json", "vocab.txt", "1_Pooling/config.json"} < copied
    assert "1_Pooling/model.py" not in copied
