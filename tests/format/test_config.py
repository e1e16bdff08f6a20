"""quantization_config: exact round trip, and one clear error for every way to get it wrong."""

from typing import Any

import pytest

from vllm_latq.errors import ConfigError, LatqError, UnsupportedShapeError
from vllm_latq.format.config import CheckpointConfig
from vllm_latq.format.scheme import LayerScheme

PACKED = LayerScheme("packed", 3, 128, True)
GOOD = CheckpointConfig(
    PACKED,
    ("lm_head",),
    {"model.layers.0.mlp.up_proj": LayerScheme("huffman")},
    "sha256:0",
    {"a": 1},
    has_kv_scales=True,
    beside={"model.embed_tokens": LayerScheme("packed", 8, 64)},
)


def changed(**changes: Any) -> dict[str, Any]:
    return {**GOOD.to_dict(), **changes}


def test_config_round_trip() -> None:
    assert CheckpointConfig.from_dict(GOOD.to_dict()) == GOOD


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(quant_method="gptq"), "quant_method: expected 'latq'"),
        (changed(format_version=1), "format_version: expected 2, found 1"),
        (changed(format_version=3), "format_version: expected 2, found 3"),
        (changed(format_version=True), "format_version: expected 2, found True"),
        (changed(format_version="2"), "format_version: expected 2, found '2'"),
        (changed(surprise=1), "unknown surprise"),
        (changed(bits=5), "bits: expected one of"),
        (changed(bits=True), "bits: expected one of"),
        (changed(bits="4"), "bits: expected one of"),
        (changed(group_size=0), "group_size: expected -1 or a positive integer, found 0"),
        (changed(group_size=-2), "group_size: expected -1"),
        (changed(outliers=1), "outliers: expected true or false"),
        (changed(outlier_coding="integer"), "unknown outlier_coding"),
        (changed(encoding="zip"), "encoding: expected one of packed, huffman, trellis"),
        (changed(encoding=["packed"]), "encoding: expected a string, found ['packed']"),
        (changed(encoding="packed", bits=None), "bits: expected one of (2, 3, 4, 8), found None"),
        (changed(group_size=None), "group_size: expected -1 or a positive integer, found None"),
        (changed(encoding="huffman"), "no bits, group_size, outliers or grid with encoding 'huffman'"),
        (changed(ignore="lm_head"), "ignore: expected a list"),
        (changed(ignore=[""]), "ignore: expected a list"),
        (changed(overrides=[]), "overrides: expected an object"),
        (changed(overrides={"a": {"bits": 4}}), "expected an object with `encoding`"),
        (changed(overrides={"a": {"encoding": "huffman", "x": 1}}), "unknown x"),
        (
            changed(overrides={"a": {"encoding": "huffman", "grid": "midrise"}}),
            "quantization_config.overrides['a']: expected no bits, group_size, outliers or grid with encoding",
        ),
        (changed(beside={"a": {"encoding": "huffman"}}), "beside['a']: expected encoding packed, without outliers"),
        (changed(beside=[]), "quantization_config.beside: expected an object"),
        (changed(kv_cache_scheme="fp8"), "kv_cache_scheme: expected {'num_bits': 8"),
        (changed(fingerprint=3), "quantization_config.fingerprint: expected a string, found 3"),
        (changed(recipe=["ssqr"]), "quantization_config.recipe: expected an object, found ['ssqr']"),
        (changed(ignore=[""]), "quantization_config.ignore: expected a list of module names, none of them empty"),
        ([], "expected an object, found list"),
    ],
)
def test_bad_config_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointConfig.from_dict(config)
    assert message in str(caught.value)


def test_missing_encoding_is_refused() -> None:
    config = GOOD.to_dict()
    del config["encoding"]
    with pytest.raises(ConfigError, match="encoding"):
        CheckpointConfig.from_dict(config)


def test_ignore_matches_whole_components() -> None:
    config = CheckpointConfig(PACKED, ("lm_head", "mlp.up_proj"))
    assert config.scheme_for("lm_head") is None
    assert config.scheme_for("model.layers.3.mlp.up_proj") is None
    assert config.scheme_for("model.layers.3.xmlp.up_proj") == PACKED
    assert config.scheme_for("my_lm_head") == PACKED


def test_ignoring_a_module_ignores_its_children() -> None:
    """Names are matched in full: the output of an attention is no part of a head called `output`."""
    config = CheckpointConfig(PACKED, ("vision_tower", "model.layers.1", "output"))
    assert config.scheme_for("vision_tower.layers.0.mlp.up_proj") is None
    assert config.scheme_for("model.layers.1.mlp.up_proj") is None
    assert config.scheme_for("model.layers.11.mlp.up_proj") == PACKED
    assert config.scheme_for("vision_towers.up_proj") == PACKED
    assert config.scheme_for("layer.0.attention.output.dense") == PACKED


def test_groups() -> None:
    assert PACKED.groups(256) == 2
    assert LayerScheme("packed", 4, -1).groups(33) == 1
    with pytest.raises(UnsupportedShapeError, match=r"divisible by group_size=128.*found 200"):
        PACKED.groups(200)


def test_errors_survive_pickling() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(UnsupportedShapeError("here", "this", "that", "Do so.")))
    assert isinstance(error, LatqError)
    assert str(error) == "here: expected this, found that. Do so."
