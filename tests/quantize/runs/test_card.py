"""The model card names its model as the hub does, and only what the method reads."""

from pathlib import Path

from vllm_latq.quantize.recipe import Recipe
from vllm_latq.quantize.runs.card import model_card

REPORT = {"totals": {"weights": 1000, "bits_per_weight": 3.0, "bytes": 375, "served_bits_per_weight": 3.25}}


def test_base_model(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "pydoc-mini").mkdir()
    monkeypatch.chdir(tmp_path / "pydoc-mini")
    cached = tmp_path / "models--org--some-model" / "snapshots" / "0123abcd"
    for source, name in ((tmp_path / "pydoc-mini", "pydoc-mini"), (Path(), "pydoc-mini"), (cached, "org/some-model")):
        card = model_card(source, Recipe("latq", bits=3.0), REPORT)
        assert f"base_model: {name}\n" in card
        assert "(375 bytes); in memory, while served, 3.250." in card
        assert f"# {name}, quantized with latq\n" in card


def test_options_are_those_of_the_method() -> None:
    latq = model_card(Path("model"), Recipe("latq", bits=3.0), REPORT)
    gptq = model_card(Path("model"), Recipe("gptq", bits=3), REPORT)
    assert "- bits: `3.0`" in latq
    assert "- group_size:" not in latq
    assert "- outlier_rate:" not in latq
    assert "- bits: `3`" in gptq
    assert "- group_size:" in gptq
