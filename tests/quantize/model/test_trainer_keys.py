"""Keys that trainers leave in config.json change nothing: neither a run nor an evaluation."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.encoders import random_encoder
from helpers.multimodal import random_multimodal
from vllm_latq.quantize.evaluation.evaluate import evaluate
from vllm_latq.quantize.model.meta_model import load_config
from vllm_latq.quantize.pipeline import quantize_checkpoint
from vllm_latq.quantize.recipe import Recipe

LEFT: dict[str, Any] = {
    **{"return_dict": False, "torchscript": True, "use_cache": True, "gradient_checkpointing": True},
    **{"output_attentions": True, "output_hidden_states": True, "output_router_logits": True},
    **{"attn_implementation": "flash_attention_2", "_attn_implementation": "flash_attention_2"},
    **{"_attn_implementation_autoset": True, "experts_implementation": "grouped_mm", "chunk_size_feed_forward": 5},
}
FEW = {"num_samples": 4, "seq_len": 32, "group_size": 16}
GPTQ = Recipe("gptq", 4, **FEW)
IGNORED = ("lm_head", "q_proj", "k_proj", "gate_proj", "up_proj", "down_proj")
RECIPES = {
    "llama": Recipe("latq", bits=6.0, ignore=IGNORED, num_samples=4, seq_len=32),
    **{"mixtral": GPTQ, "idefics3": GPTQ, "bert": Recipe("gptq", 4, **FEW, ignore=())},
}


@pytest.mark.parametrize("family", RECIPES)
def test_a_run_and_an_evaluation_are_the_same(
    family: str, random_model: Any, mini_model: Path, calibration_text: Path, tmp_path: Path
) -> None:
    plain, trained = tmp_path / "plain", tmp_path / "trained"
    if family == "bert":
        random_encoder(plain, family, calibration_text)
    elif family == "idefics3":
        random_multimodal(plain, family, mini_model)
    else:
        shutil.copytree(random_model(family, f"trained-{family}")[0], plain)
    shutil.copytree(plain, trained)
    config = json.loads((trained / "config.json").read_text())
    # transformers itself refuses flash attention with output_attentions.
    left = {key: value for key, value in LEFT.items() if key != "output_attentions"}
    if "text_config" in config:
        config["text_config"] |= left
    (trained / "config.json").write_text(json.dumps(config | left))
    for source in (plain, trained):
        quantize_checkpoint(RECIPES[family], source, source / "out", calibration=str(calibration_text))
    shards = sorted((plain / "out").glob("*.safetensors"))
    assert shards
    for shard in shards:
        assert (trained / "out" / shard.name).read_bytes() == shard.read_bytes(), shard.name
    if family != "bert":
        text = str(calibration_text)
        results = [
            evaluate(source / "out", text, seq_len=32, baseline=source, max_windows=2, device="cpu").to_dict()
            for source in (plain, trained)
        ]
        for key in ("perplexity", "kl", "top1_agreement"):
            assert results[0][key] == results[1][key]


@pytest.mark.parametrize("key", LEFT)
def test_each_key_alone_gives_the_same_configuration(key: str, mini_model: Path, tmp_path: Path) -> None:
    config = json.loads((mini_model / "config.json").read_text()) | {key: LEFT[key]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain, trained = load_config(mini_model), load_config(tmp_path)
    known = vars(plain).keys() - {"_name_or_path"}
    assert {name: getattr(trained, name) for name in known} == {name: getattr(plain, name) for name in known}
