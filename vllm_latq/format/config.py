"""The `quantization_config` of a checkpoint: which linear is stored how. FORMAT.md section 2 is its specification.

Invariant: an instance is valid; unknown keys, versions and values are refused when it is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_latq.errors import ConfigError, UnsupportedShapeError

QUANT_METHOD = "latq"
FORMAT_VERSION = 1
ENCODINGS = ("packed", "huffman", "rans")
SUPPORTED_BITS = (2, 3, 4, 8)
GRIDS = ("midtread", "midrise")
WHOLE_ROW = -1

_DEFAULT_WHERE = "quantization_config"
_SCHEME_KEYS = ("encoding", "bits", "group_size", "outliers", "grid")
# Written only where they differ from this: readers of the first checkpoints did not know them.
_LATER_KEYS = {"grid": "midtread"}
_CONFIG_KEYS = ("quant_method", "format_version", *_SCHEME_KEYS, "ignore", "overrides", "fingerprint", "recipe")


@dataclass(frozen=True)
class LayerScheme:
    """How one linear is stored.

    Attributes:
        encoding: "packed" (b-bit codes with group scales, optionally CSR outliers), "huffman" (integers on one
            scalar scale, entropy coded) or "rans" (integers on scales of rows and columns, entropy coded by classes).
        bits: code width of "packed" (2, 3, 4 or 8); None for the others.
        group_size: input channels that share a scale, -1 for the whole row; None if not "packed".
        outliers: whether "packed" carries a CSR matrix of outliers.
        grid: "midtread", the multiples of the scale (of "packed" from -2^(bits-1) to 2^(bits-1) - 1), or "midrise", of
            "packed" and "rans", those half a step above them, which lie symmetrically around zero and leave zero out.
    """

    encoding: Literal["packed", "huffman", "rans"]
    bits: int | None = None
    group_size: int | None = None
    outliers: bool = False
    grid: Literal["midtread", "midrise"] = "midtread"

    def __post_init__(self) -> None:
        where = _DEFAULT_WHERE
        if self.encoding not in ENCODINGS:
            raise ConfigError(f"{where}.encoding", f"one of {', '.join(ENCODINGS)}", repr(self.encoding))
        if type(self.outliers) is not bool:
            raise ConfigError(f"{where}.outliers", "true or false", repr(self.outliers))
        if self.grid not in GRIDS or (self.grid != "midtread" and self.encoding == "huffman"):
            expected = f"one of {', '.join(GRIDS)}, the latter not of encoding 'huffman'"
            raise ConfigError(f"{where}.grid", expected, repr(self.grid))
        if self.encoding != "packed":
            if (self.bits, self.group_size, self.outliers) != (None, None, False):
                found = f"bits={self.bits!r}, group_size={self.group_size!r}, outliers={self.outliers!r}"
                raise ConfigError(where, f"no bits, group_size or outliers beside encoding {self.encoding!r}", found)
            return
        if type(self.bits) is not int or self.bits not in SUPPORTED_BITS:
            raise ConfigError(f"{where}.bits", f"one of {SUPPORTED_BITS}", repr(self.bits))
        if type(self.group_size) is not int or (self.group_size != WHOLE_ROW and self.group_size < 1):
            raise ConfigError(f"{where}.group_size", "-1 or a positive integer", repr(self.group_size))

    def groups(self, cols: int, where: str = "layer") -> int:
        """Number of scale groups in a row of `cols` input channels; raises if the groups do not divide it."""
        if self.group_size is None:
            raise ConfigError(where, "encoding 'packed'", f"encoding {self.encoding!r}, which has no groups")
        if self.group_size == WHOLE_ROW:
            return 1
        if cols % self.group_size:
            raise UnsupportedShapeError(
                where,
                f"input channels divisible by group_size={self.group_size}",
                f"{cols} input channels",
                "Choose a group size that divides them, or -1 for one scale per row.",
            )
        return cols // self.group_size

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        values = {key: getattr(self, key) for key in _SCHEME_KEYS}
        return {key: value for key, value in values.items() if value is not None and value != _LATER_KEYS.get(key)}


@dataclass(frozen=True)
class CheckpointConfig:
    """The whole `quantization_config`.

    Attributes:
        scheme: of every quantized linear that `overrides` does not name.
        ignore: modules that stay unquantized: linears by their names, or endings of these after a dot; others, with all
            that is in them, by their names.
        overrides: full module name -> its own scheme.
        fingerprint: "sha256:" + hex digest over `reading` and all tensors (FORMAT.md section 5); "" before it is known.
        recipe: the recipe that made the checkpoint, as plain JSON values; informative.
    """

    scheme: LayerScheme
    ignore: tuple[str, ...] = ()
    overrides: Mapping[str, LayerScheme] = field(default_factory=dict)
    fingerprint: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)

    def is_ignored(self, module: str) -> bool:
        """Whether a module, or one that it is part of, is to stay unquantized."""
        return any(covers(entry, module) for entry in self.ignore)

    def scheme_for(self, module: str) -> LayerScheme | None:
        """The scheme of a linear by its full module name; None if it stays unquantized."""
        return None if self.is_ignored(module) else self.overrides.get(module, self.scheme)

    def reading(self) -> dict[str, Any]:
        """What the tensors' meaning depends on, as JSON: all but the fingerprint, which covers it, and the recipe."""
        return {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            **self.scheme.to_dict(),
            "ignore": list(self.ignore),
            "overrides": {name: scheme.to_dict() for name, scheme in self.overrides.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**self.reading(), "fingerprint": self.fingerprint, "recipe": dict(self.recipe)}

    @classmethod
    def from_dict(cls, config: Any, where: str = _DEFAULT_WHERE) -> "CheckpointConfig":
        """Parse and validate; raises ConfigError on anything this version does not know."""
        if not isinstance(config, Mapping):
            raise ConfigError(where, "an object", type(config).__name__)
        if config.get("quant_method") != QUANT_METHOD:
            raise ConfigError(f"{where}.quant_method", repr(QUANT_METHOD), repr(config.get("quant_method")))
        version = config.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            hint = "Use the release of vllm-latq that wrote this checkpoint, or quantize again."
            raise ConfigError(f"{where}.format_version", str(FORMAT_VERSION), repr(version), hint)
        _refuse_unknown(config, _CONFIG_KEYS, where)
        ignore, overrides = config.get("ignore", []), config.get("overrides", {})
        if not isinstance(ignore, list | tuple) or not all(isinstance(entry, str) and entry for entry in ignore):
            raise ConfigError(f"{where}.ignore", "a list of module names, none of them empty", repr(ignore))
        if not isinstance(overrides, Mapping):
            raise ConfigError(f"{where}.overrides", "an object", type(overrides).__name__)
        fingerprint, recipe = config.get("fingerprint", ""), config.get("recipe", {})
        if not isinstance(fingerprint, str):
            raise ConfigError(f"{where}.fingerprint", "a string", repr(fingerprint))
        if not isinstance(recipe, Mapping):
            raise ConfigError(f"{where}.recipe", "an object", repr(recipe))
        return cls(
            scheme=_parse_scheme({key: config[key] for key in _SCHEME_KEYS if key in config}, where),
            ignore=tuple(ignore),
            overrides={name: _parse_scheme(value, f"{where}.overrides[{name!r}]") for name, value in overrides.items()},
            fingerprint=fingerprint,
            recipe=dict(recipe),
        )


def covers(entry: str, module: str) -> bool:
    """Whether an entry of `ignore` names a module: by its whole name, an ending of it, or what it is in."""
    return f".{module}".endswith(f".{entry}") or module.startswith(f"{entry}.")


def _parse_scheme(value: Any, where: str) -> LayerScheme:
    if not isinstance(value, Mapping) or "encoding" not in value:
        raise ConfigError(where, "an object with `encoding`", repr(value))
    _refuse_unknown(value, _SCHEME_KEYS, where)
    try:
        return LayerScheme(**value)
    except ConfigError as error:  # which names the place of the model's own scheme
        place = where + error.where.removeprefix(_DEFAULT_WHERE)
        raise ConfigError(place, error.expected, error.found, error.hint) from None


def _refuse_unknown(value: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise ConfigError(where, f"keys among {', '.join(known)}", f"unknown {', '.join(unknown)}")
