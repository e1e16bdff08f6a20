"""The recipe refuses every bad value by name, and survives the way through JSON."""

import dataclasses
import json
import math

import pytest

from vllm_latq.errors import ConfigError
from vllm_latq.format.scheme import LayerScheme
from vllm_latq.quantize.recipe import METHODS, PRESETS, Recipe

GOOD = {
    "rtn": {"bits": 3, "group_size": 64, "scales": "absmax"},
    "gptq": {
        "bits": 2,
        "group_size": -1,
        "order": "min-pivot",
        "damping": 0.1,
        "block_size": 32,
        "target": "original",
        "scales": "fitted",
        "beam": 2,
        "sweeps": 3,
        "dtype": "bfloat16",
    },
    "ssqr": {
        "bits": 8,
        "outlier_rate": 0.5,
        "seed": 7,
        "rounding": "stochastic",
        "ignore": ("lm_head", "mlp.gate"),
    },
    "hptq": {"bits": 2.5, "reduction": "lll", "order": "natural", "num_samples": 3, "seq_len": 100},
    "hrtn": {"bits": 16},
    "latq": {"bits": 3.6, "target": "residual", "correction": 0.5},
}


@pytest.mark.parametrize("method", METHODS)
def test_round_trip_through_json(method):
    recipe = Recipe(method, **GOOD[method])
    values = json.loads(json.dumps(recipe.to_dict()))
    # A checkpoint's card and page would else tell of scales that latq does not have.
    assert ("group_size" in values) is (method in ("rtn", "gptq", "ssqr"))
    assert {"method", "bits", "num_samples", "seq_len", "seed", "ignore"} <= set(values)
    assert Recipe.from_dict(values) == recipe
    assert hash(Recipe.from_dict(values)) == hash(recipe)


def test_presets_and_what_stays_free():
    assert [Recipe.of(name, {}).method for name in PRESETS] == ["gptq", "latq", "latq"]
    assert Recipe.of(None, {}) == Recipe.of("balanced", {}) == Recipe("latq", bits=4)
    assert Recipe.of("best", {"bits": 3}) == Recipe("latq", bits=3, target="residual", correction=0.5)
    assert Recipe.of("best", {"correction": 1.0}).correction == 1.0
    assert Recipe.of(None, {"method": "rtn", "group_size": 128}).free == {"seq_len"}
    assert Recipe.of("fast", {}).free == {"group_size", "seq_len"}
    assert "free" not in Recipe.of("fast", {}).to_dict()
    assert Recipe("gptq").free == set()


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("quick", {}, "recipe.preset: expected one of fast, balanced, best, found 'quick'"),
        ("best", {"method": "latq"}, "recipe.method: expected none beside a preset"),
        (None, {"wbits": 4}, "unknown wbits"),
        (None, {"free": ()}, "unknown free"),
    ],
)
def test_bad_presets(preset, options, message):
    with pytest.raises(ConfigError, match=message):
        Recipe.of(preset, options)


def test_defaults():
    recipe = Recipe("ssqr")
    assert (recipe.bits, recipe.group_size, recipe.outlier_rate, recipe.order, recipe.scales) == (
        4,
        128,
        0.01,
        "act",
        "fitted",
    )
    assert (recipe.outliers, Recipe("ssqr", outliers="overflow").scales) == ("saving", "mse")
    assert (Recipe("gptq").scales, Recipe("rtn").scales) == ("mse", "mse")
    assert (recipe.damping, recipe.num_samples, recipe.seq_len, recipe.ignore) == (0.01, 256, 2048, ("lm_head",))
    assert Recipe.from_dict({"method": "ssqr"}) == recipe
    # The head takes part in latq's allocation of bits.
    assert Recipe("latq").ignore == ()


def test_scheme_of_each_method():
    assert Recipe("rtn", bits=3).scheme == LayerScheme("packed", 3, 128, False)
    assert Recipe("gptq", group_size=-1).scheme == LayerScheme("packed", 4, -1, False)
    assert Recipe("ssqr", bits=2).scheme == LayerScheme("packed", 2, 128, True)
    assert Recipe("hptq", bits=3).scheme == Recipe("hrtn", bits=2).scheme == LayerScheme("huffman")
    assert Recipe("latq", bits=3).scheme == LayerScheme("trellis")


def test_plain_rounding_needs_no_calibration():
    needed = {method: Recipe(method, **GOOD[method]).needs_calibration for method in METHODS}
    assert needed == {"rtn": False, "gptq": True, "ssqr": True, "hptq": True, "hrtn": False, "latq": True}


BAD = [
    ("gptq", "bits", [0, 1, 5, 6, 16, -4, True, 4.0, "4", None]),
    ("gptq", "group_size", [0, -2, 12.5, True, "128", None]),
    ("ssqr", "outlier_rate", [0, 0.0, -0.01, 0.51, 1, math.nan, math.inf, True, "1%", None]),
    ("ssqr", "outliers", ["Saving", None]),
    ("gptq", "beam", [0, -1, 2.0, True, None]),
    ("ssqr", "sweeps", [-1, 1.5, True, None]),
    ("latq", "bits", [None, 0, 1.0, 16.01, True]),
    ("hptq", "bits", [None, 0, 1, 1.0, 16.01, -3, math.nan, math.inf, True, "3"]),
    ("hrtn", "bits", [None, 1.0, 17]),
    ("gptq", "order", ["", "descending", "ACT", None, 1]),
    ("gptq", "damping", [0, 0.0, -0.01, math.nan, math.inf, True, "0.01", None]),
    ("gptq", "scales", ["", "max", ["mse"]]),
    ("gptq", "dtype", ["", "float64", "torch.bfloat16", None]),
    ("rtn", "scales", ["fitted"]),
    ("ssqr", "scales", ["mse", "signed", "absmax"]),
    ("gptq", "target", ["", "corrected", None]),
    ("gptq", "correction", [0.0, 1.5, 0.5, math.nan, True, None]),
    ("hrtn", "target", ["original"]),
    ("gptq", "rounding", ["", "up", None]),
    ("hptq", "reduction", ["", "bkz", None]),
    ("gptq", "reduction", ["lll"]),
    ("ssqr", "reduction", ["lll"]),
    ("rtn", "rounding", ["stochastic"]),
    ("gptq", "num_samples", [0, -1, 1.5, True, None]),
    ("gptq", "seq_len", [0, -1, 2048.0, None]),
    ("gptq", "seed", [-1, 2**64, 0.5, True, None]),
    ("gptq", "block_size", [0, -128, None]),
    ("gptq", "ignore", ["lm_head", ("",), (1,), {"lm_head"}]),
    ("gptq", "bits", [3.0]),
    ("gptq", "outlier_rate", [0.02]),
    ("rtn", "order", ["natural"]),
    ("rtn", "damping", [0.02]),
    ("latq", "order", ["natural"]),
    ("hptq", "group_size", [64]),
    ("hptq", "scales", ["absmax"]),
    ("hrtn", "order", ["natural"]),
    ("hptq", "rounding", ["rate"]),
    ("hptq", "sweeps", [1]),
    ("latq", "beam", [2]),
]


@pytest.mark.parametrize(
    ("method", "options", "field"),
    [
        ("gptq", {"rounding": "stochastic", "sweeps": 1}, "rounding"),
        ("ssqr", {"outliers": "overflow", "scales": "fitted"}, "scales"),
        ("ssqr", {"outliers": "overflow", "beam": 2}, "beam"),
        ("hptq", {"bits": 3.0, "rounding": "stochastic", "beam": 2}, "rounding"),
        ("hptq", {"bits": 3.0, "reduction": "lll", "beam": 2}, "reduction"),
    ],
)
def test_options_that_exclude_each_other(method, options, field):
    with pytest.raises(ConfigError, match=f"^recipe.{field}: expected"):
        Recipe(method, **options)


@pytest.mark.parametrize(
    ("outliers", "scales", "expected", "hint"),
    [
        ("saving", "mse", "fitted", "Leave out scales, or choose outliers overflow."),
        ("overflow", "fitted", "mse, absmax, signed", "Choose one of them, or outliers saving."),
    ],
)
def test_scales_that_do_not_suit_the_outliers(outliers, scales, expected, hint):
    with pytest.raises(ConfigError) as caught:
        Recipe("ssqr", outliers=outliers, scales=scales)
    assert (caught.value.where, caught.value.expected, caught.value.hint) == ("recipe.scales", expected, hint)
    other = {"saving": "overflow", "overflow": "saving"}[outliers]
    assert Recipe("ssqr", outliers=other, scales=scales).scales == scales


@pytest.mark.parametrize(("method", "field", "value"), [(m, f, value) for m, f, values in BAD for value in values])
def test_bad_values_are_refused_by_name(method, field, value):
    for build in (
        lambda options: Recipe(method, **options),
        lambda options: Recipe.from_dict({"method": method, **options}),
    ):
        with pytest.raises(ConfigError, match=f"^recipe.{field}: expected .*, found ") as caught:
            build({field: value})
        assert ("nothing" if value is None else repr(value)) in str(caught.value)


@pytest.mark.parametrize("method", ["", "awq", "GPTQ", None, 4])
def test_unknown_method_lists_the_known_ones(method):
    with pytest.raises(ConfigError, match="rtn, gptq, ssqr, hptq, hrtn"):
        Recipe(method)


def test_unused_options_say_so():
    with pytest.raises(ConfigError, match="hptq does not use group_size: leave it out"):
        Recipe("hptq", group_size=32)


def test_from_dict_refuses_what_it_does_not_know():
    with pytest.raises(ConfigError, match="unknown bit, group"):
        Recipe.from_dict({"method": "gptq", "group": 1, "bit": 4})
    with pytest.raises(ConfigError, match="expected an object, found list"):
        Recipe.from_dict(["gptq"])
    with pytest.raises(ConfigError, match=r"recipe\.method: expected one of rtn, .*, found nothing"):
        Recipe.from_dict({"bits": 4})


def test_recipe_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe("rtn").bits = 3
