"""The recipe of a quantization run.

Invariant: an instance is valid; it states everything the result depends on besides model and calibration text. This
module imports no torch, so that `latq --help` takes its choices and defaults from here.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from vllm_latq.errors import ConfigError
from vllm_latq.format.scheme import GRIDS, SUPPORTED_BITS, WHOLE_ROW, LayerScheme, grid_name
from vllm_latq.quantize.lattice.choices import ORDERS, REDUCTIONS, ROUNDINGS, SCALE_METHODS, TARGETS

# Fields that a method does not read. Setting one would suggest an effect it does not have, so it is refused.
_RECURSION = ("order", "damping", "block_size", "rounding", "target", "correction", "beam", "sweeps")
_OUTLIERS = ("outlier_rate", "outliers")
_GRID = ("group_size", "scales", "grid", *_OUTLIERS)
UNUSED: Mapping[str, tuple[str, ...]] = {
    "rtn": (*_OUTLIERS, "reduction", *_RECURSION),
    "gptq": (*_OUTLIERS, "reduction"),
    "ssqr": ("reduction",),
    "hptq": ("sweeps", *_GRID),
    "hrtn": ("reduction", *_GRID, *_RECURSION),
    "latq": ("order", "block_size", "rounding", "beam", "sweeps", "reduction", "scales", *_OUTLIERS),
}
METHODS = tuple(UNUSED)
# Grids of latq: the trellis code, or packed integers on group scales, of a width for each linear.
TRELLIS, GROUP = LATQ_GRIDS = ("trellis", "group")
HUFFMAN_METHODS = ("hptq", "hrtn")
# Methods whose bits are an average that may be any number.
AVERAGE_METHODS = (*HUFFMAN_METHODS, "latq")
DTYPES = ("auto", "float32", "bfloat16", "float16")
UNQUANTIZED = 16
# Allowed values of each field that is a choice.
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "method": METHODS,
    "order": ORDERS,
    "rounding": ROUNDINGS,
    "reduction": REDUCTIONS,
    "scales": (*SCALE_METHODS, "fitted"),
    "grid": (*GRIDS, *LATQ_GRIDS),
    "target": TARGETS,
    "outliers": ("saving", "overflow"),
    "dtype": DTYPES,
    "kv_cache_scheme": ("none", "fp8"),
    "embedding_bits": (4, 8, UNQUANTIZED),
    "mtp_bits": (*SUPPORTED_BITS, UNQUANTIZED),
}
DEFAULT_METHOD = "latq"
# Name -> fields of a recipe, the cheapest first.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fast": {"method": "gptq"},
    "balanced": {"method": DEFAULT_METHOD},
    "best": {"method": DEFAULT_METHOD, "target": "residual", "correction": 0.5},
}
# Fields with defaults that do not suit every model.
SUITABLE = ("group_size", "seq_len")
MAX_OUTLIER_RATE = 0.5
DEFAULT_BITS = 4
HEAD = "lm_head"
# A Huffman code takes at least a bit per weight, and so does the trellis code.
MAX_AVERAGE_BITS = 16.0
MAX_SEED = 2**64  # torch draws with seeds below


@dataclass(frozen=True)
class Recipe:
    """How to quantize a model.

    Attributes:
        method: rtn (round to nearest), gptq (clipped), ssqr (with sparse outliers), hptq (unclipped, one scale,
            Huffman-coded), hrtn (the same by plain rounding) or latq (against the loss of the whole model, by a trellis
            code).
        bits: of rtn, gptq and ssqr the width of the codes: 2, 3, 4 or 8. Of hptq and hrtn the average stored bits per
            weight of each layer, and of latq those of the model, in files and in memory, everything counted: any number
            above 1.
        group_size: input channels per scale, -1 for the whole row.
        outlier_rate: share of the weights that ssqr may keep as outliers, in (0, 0.5].
        order: rounding order: natural, act or min-pivot.
        damping: lambda relative to the mean diagonal of the Hessian.
        rounding: nearest, or stochastic: up with the fractional part as probability, drawn from `seed` and the layer's
            name.
        reduction: none, or lll: hptq rounds on the reduced basis where that lowers the bound.
        scales: absmax, mse (for gptq of the errors' cubes), signed (mse, with the sign that suits the group), or
            fitted: signed, and for gptq fitted to the errors that the recursion makes with them, for ssqr together
            with the outliers that are chosen by saving. None chooses: fitted for those outliers, otherwise mse.
        grid: grid of packed weights: midtread (multiples of the scale, zero among them) or midrise (shifted by half a
            scale, symmetric around zero: better for dense weights in 2 bits). For latq trellis, or group: packed
            weights on a mid-tread grid, with 2, 3, 4 or 8 bits for each linear. None chooses midtread, and trellis for
            latq.
        target: the output that a quantized layer should match: quantized (its own weights on the inputs that the
            quantized prefix gives it), original (the original model's), or residual (as original; the last linear of
            a block also cancels the error in the residual stream).
        correction: share of the way to the corrected weights that targets original and residual go, in (0, 1].
        num_samples: calibration sequences.
        seq_len: tokens in each.
        dtype: dtype of the model while it is quantized, weights included: auto (float32 on a CPU, the model's own
            elsewhere), float32, bfloat16 or float16. Hessians are always float32 sums; the algorithms compute in
            float32 and float64.
        seed: seed for the calibration sequences, stochastic rounding, and the labels that latq draws.
        ignore: linears (names or dotted suffixes) and modules (names) that stay unquantized. None chooses: nothing for
            latq, which shares its bits out over blocks and head, otherwise lm_head.
        block_size: columns per lazy batch of the recursion; changes speed only.
        outliers: weights that ssqr keeps: those whose rounding would cost most ("saving"; others beyond the grid are
            clipped and their errors fed back), or all that overflow the grid ("overflow", the paper's).
        beam: roundings per row that nearest plane keeps (K-best); for ssqr only where outliers are chosen by saving.
        sweeps: maximum coordinate-descent sweeps after nearest plane (gptq, ssqr).
        kv_cache_scheme: none, or fp8: also store scales of keys and values for a KV cache in 8-bit floats, measured on
            the calibration text in the quantized model.
        embedding_bits: width of the codes of the input embedding, which is rounded to nearest: 4 or 8; 16 leaves it.
        mtp_bits: width of the codes of layers that predict further tokens (MTP), which are rounded to nearest: 2, 3, 4
            or 8; 16 leaves them.
        free: fields, some of SUITABLE, that a run may change to suit the model; no part of what is stored.
    """

    method: str
    bits: float = DEFAULT_BITS
    group_size: int = 128
    outlier_rate: float = 0.01
    order: str = "act"
    damping: float = 0.01
    rounding: str = "nearest"
    reduction: str = "none"
    scales: str | None = None
    target: str = "quantized"
    correction: float = 1.0
    num_samples: int = 256
    seq_len: int = 2048
    dtype: str = "auto"
    seed: int = 0
    ignore: tuple[str, ...] | None = None
    block_size: int = 128
    outliers: str = "saving"
    beam: int = 1
    sweeps: int = 0
    grid: str | None = None
    kv_cache_scheme: str = "none"
    embedding_bits: int = UNQUANTIZED
    mtp_bits: int = UNQUANTIZED
    free: frozenset[str] = field(default=frozenset(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if name not in ("scales", "grid"):
                _check_choice(name, getattr(self, name), choices)
        if "grid" not in UNUSED[self.method]:
            grids = LATQ_GRIDS if self.method == "latq" else GRIDS
            object.__setattr__(self, "grid", grids[0] if self.grid is None else self.grid)
            _check_choice("grid", self.grid, grids)
        if "scales" not in UNUSED[self.method]:
            self._settle_scales()
        self._check_numbers()
        self._check_bits()
        ignored = self.ignore
        if ignored is None:
            ignored = () if self.method == "latq" else (HEAD,)
        object.__setattr__(self, "ignore", _names("ignore", ignored))
        self._check_unused()
        self._check_rounding()
        self._check_targets()

    def _settle_scales(self) -> None:
        """Choose the scales that suit the method, where none are given."""
        together = self.clips_by_price
        if self.scales is None:
            object.__setattr__(self, "scales", "fitted" if together else "mse")
        _check_choice("scales", self.scales, SCALE_METHODS if self.method == "rtn" else CHOICES["scales"])
        if self.method == "ssqr" and (self.scales == "fitted") != together:
            if together:
                raise _error("scales", "fitted", self.scales, "Leave out scales, or choose outliers overflow.")
            hint = "Choose one of them, or outliers saving."
            raise _error("scales", ", ".join(SCALE_METHODS), self.scales, hint)

    def _check_numbers(self) -> None:
        if self.group_size != WHOLE_ROW:
            _check_integer("group_size", self.group_size, 1, "-1 (whole row) or a positive integer")
        for name in ("num_samples", "seq_len", "block_size", "beam"):
            _check_integer(name, getattr(self, name), 1)
        for name in ("seed", "sweeps"):
            _check_integer(name, getattr(self, name), 0)
        if self.seed >= MAX_SEED:
            raise _error("seed", f"an integer below {MAX_SEED}, which torch can draw with", self.seed)
        _check_number("outlier_rate", self.outlier_rate, 0.0, MAX_OUTLIER_RATE)
        _check_number("damping", self.damping, 0.0, math.inf)
        _check_number("correction", self.correction, 0.0, 1.0)

    def _check_bits(self) -> None:
        if self.grid == GROUP:
            _check_number("bits", self.bits, SUPPORTED_BITS[0], MAX_AVERAGE_BITS)
        elif self.method in AVERAGE_METHODS:
            _check_number("bits", self.bits, 1.0, MAX_AVERAGE_BITS)
        else:
            _check_choice("bits", self.bits, SUPPORTED_BITS)

    def _check_unused(self) -> None:
        for own in fields(self):
            if own.name in self.unused and getattr(self, own.name) != own.default:
                hint = f"{self.method} does not use {own.name}: leave it out."
                if own.name not in UNUSED[self.method]:
                    hint = f"The trellis code has no groups: leave {own.name} out, or choose grid group."
                raise _error(own.name, f"the default {own.default!r}", getattr(self, own.name), hint)

    def _check_rounding(self) -> None:
        if self.rounding == "stochastic" and (self.beam > 1 or self.sweeps):
            raise _error("rounding", "nearest", self.rounding, "A beam and sweeps choose where this draws.")
        if self.method == "ssqr" and self.beam > 1 and self.outliers != "saving":
            raise _error("beam", "1", self.beam, "Overflow has no cost to compare: leave outliers out.")
        if self.reduction != "none" and self.beam > 1:
            raise _error("reduction", "none", self.reduction, "A reduced basis is rounded on by nearest plane only.")
        if self.grid == "midrise" and self.scales == "signed":
            raise _error("scales", "scales without signs", self.scales, "A mid-rise grid is the same on both sides.")

    def _check_targets(self) -> None:
        if self.target == "quantized" and self.correction != 1.0:
            raise _error("correction", "the default 1.0", self.correction, "Set a target, original or residual.")

    @classmethod
    def of(cls, preset: str | None, options: Mapping[str, Any]) -> "Recipe":
        """Return the recipe of a preset, with options in place of its fields. Of SUITABLE, what is not given is free.

        Args:
            preset: one of PRESETS; None takes the method of the options, or else the default method.
            options: fields of the recipe.

        Raises:
            ConfigError: no such preset or field, a preset and a method, or values that contradict each other.
        """
        if preset is None:
            recipe = cls.from_dict({"method": DEFAULT_METHOD, **options})
        else:
            _check_choice("preset", preset, tuple(PRESETS))
            if "method" in options:
                expected = "none beside a preset, which sets it"
                raise _error("method", expected, options["method"], "Leave out one of them.")
            recipe = cls.from_dict({**PRESETS[preset], **options})
        return replace(recipe, free=frozenset(SUITABLE) - options.keys())

    @property
    def scheme(self) -> LayerScheme:
        """How the layers are stored; with grid group, how one of the least bits is: each layer has its own."""
        if self.grid == TRELLIS:
            return LayerScheme("trellis")
        if self.grid == GROUP:
            return LayerScheme("packed", SUPPORTED_BITS[0], self.group_size)
        if self.method in HUFFMAN_METHODS:
            return LayerScheme("huffman")
        grid = grid_name(self.grid == "midrise")
        return LayerScheme("packed", self.width, self.group_size, self.method == "ssqr", grid=grid)

    @property
    def unused(self) -> tuple[str, ...]:
        """Fields that the recipe does not read."""
        return unused(self.method, self.grid)

    @property
    def scale_method(self) -> str:
        """`scales` of a method that has group scales; other methods raise ConfigError."""
        if self.scales is None:
            raise _error("scales", f"a choice, which {self.method} does not have", None)
        return self.scales

    @property
    def ignored(self) -> tuple[str, ...]:
        """`ignore`, with None replaced by what the method chooses."""
        return self.ignore or ()

    @property
    def width(self) -> int:
        """Width of the codes of rtn, gptq and ssqr."""
        return int(self.bits)

    @property
    def offset(self) -> float:
        """Offset of the grid, in steps."""
        return 0.5 if self.grid == "midrise" else 0.0

    @property
    def needs_calibration(self) -> bool:
        """Return whether the method reads a Hessian; the others only use one to measure their error."""
        return self.method not in ("rtn", "hrtn")

    @property
    def needs_text(self) -> bool:
        """Return whether a run needs a calibration text: for Hessians, or for the scales of a KV cache."""
        return self.needs_calibration or self.kv_cache_scheme != "none"

    @property
    def passes_text(self) -> bool:
        """Return whether the text passes through the quantized blocks although method latq does not need that."""
        return self.target != "quantized" or self.kv_cache_scheme != "none"

    @property
    def clips_by_price(self) -> bool:
        """Return whether weights are clipped where that costs less than an outlier: the bound counts them."""
        return self.method == "ssqr" and self.outliers == "saving"

    @property
    def may_exceed_half_step(self) -> bool:
        """Return whether residuals on the grid may exceed half a step, so that the bound has to count them.

        A beam's residuals may, too, where nothing is clipped, but its cheapest survivor costs no more than nearest
        plane may.
        """
        return self.sweeps > 0 or (self.beam > 1 and (self.method == "gptq" or self.clips_by_price))

    @property
    def bound_ignores_clipping(self) -> bool:
        """Return whether weights may be clipped that the bound does not count."""
        return self.method == "gptq" and not self.may_exceed_half_step

    def rounding_seed(self, layer: str) -> int | None:
        """Return the seed of a layer's stochastic rounding, the same for every run; None for rounding to nearest."""
        if self.rounding != "stochastic":
            return None
        return int.from_bytes(hashlib.sha256(f"{self.seed} {layer}".encode()).digest()[:8], "big") >> 1

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that the method reads, as plain JSON values."""
        values = {**asdict(self), "ignore": list(self.ignored)}
        return {name: value for name, value in values.items() if name not in (*self.unused, "free")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Recipe":
        """Return the recipe of a dict that `to_dict` made; fields may be left out, ConfigError refuses unknown keys."""
        if not isinstance(values, Mapping):
            raise ConfigError("recipe", "an object", type(values).__name__)
        known = {known.name for known in fields(cls)} - {"free"}
        unknown = sorted(str(key) for key in values if key not in known)
        if unknown:
            raise ConfigError("recipe", f"keys among {', '.join(sorted(known))}", f"unknown {', '.join(unknown)}")
        if "method" not in values:
            raise _error("method", f"one of {', '.join(METHODS)}", None)
        return cls(**values)


def unused(method: str, grid: str | None) -> tuple[str, ...]:
    """Return the fields that a method does not read on a grid; None is the method's default."""
    return UNUSED[method] if method != "latq" or grid == GROUP else (*UNUSED[method], "group_size")


def _error(field: str, expected: str, found: Any, hint: str = "") -> ConfigError:
    return ConfigError(f"recipe.{field}", expected, "nothing" if found is None else repr(found), hint)


def _check_choice(field: str, value: Any, choices: tuple[Any, ...]) -> None:
    # A bool is an int to Python, and a mistake here.
    if type(value) is not type(choices[0]) or value not in choices:
        raise _error(field, f"one of {', '.join(map(str, choices))}", value)


def _check_integer(field: str, value: Any, low: int, expected: str = "") -> None:
    if type(value) is not int or value < low:
        raise _error(field, expected or f"an integer of at least {low}", value)


def _check_number(field: str, value: Any, above: float, up_to: float) -> None:
    if type(value) not in (int, float) or not above < value <= up_to or math.isinf(value):
        expected = f"a finite number above {above:g}" + ("" if math.isinf(up_to) else f" and at most {up_to:g}")
        raise _error(field, expected, value)


def _names(field: str, value: Any) -> tuple[str, ...]:
    # A bare string would be taken apart into letters.
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
        raise _error(field, "a list of names", value)
    return tuple(value)
