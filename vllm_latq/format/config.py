"""The `quantization_config` of a checkpoint: how each linear is stored. FORMAT.md section 2 is its specification.

Invariant: an instance made by `from_dict` is valid; unknown keys, versions and values are refused.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_latq.errors import ConfigError
from vllm_latq.format.encodings.registry import encoding_of
from vllm_latq.format.scheme import CONFIG_KEY, SCHEME_KEYS, LayerScheme

QUANT_METHOD = "latq"
FORMAT_VERSION = 2

# Keys of config.json that make transformers load other files than those of the index.
REDIRECTING_KEYS = ("transformers_weights",)
# The one value of such a key that a checkpoint may have. Without the quantizer of this package, transformers only warns
# of an unknown quantization and makes random weights. With this value it raises ValueError, and prints the value.
NEEDS_IMPORT = "none. The model is quantized by vllm-latq: run `import vllm_latq` before transformers loads it"
# The one value that `kv_cache_scheme` may have, in the words of compressed-tensors: float8_e4m3, a scale per layer.
KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
_CONFIG_KEYS = (
    "quant_method", "format_version", *SCHEME_KEYS, "ignore", "overrides", "beside", "kv_cache_scheme", "fingerprint",
    "recipe",
)  # fmt: skip


@dataclass(frozen=True)
class CheckpointConfig:
    """The whole `quantization_config`.

    Attributes:
        scheme: the scheme of every quantized linear that `overrides` does not name.
        ignore: modules that stay unquantized: linears by full names or dotted suffixes; other modules, with everything
            in them, by full names.
        overrides: full module name -> the module's own scheme.
        fingerprint: "sha256:" + hex digest over `reading` and all tensors (FORMAT.md section 5); "" before it is known.
        recipe: the recipe that made the checkpoint, as plain JSON values; informative.
        has_kv_scales: whether the checkpoint has scales for a KV cache in 8-bit floats.
        beside: full module name -> scheme of each quantized matrix that is no linear of a block and no head: an
            embedding, or a linear of layers that predict further tokens. What `ignore` says does not count for them.
    """

    scheme: LayerScheme
    ignore: tuple[str, ...] = ()
    overrides: Mapping[str, LayerScheme] = field(default_factory=dict)
    fingerprint: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    has_kv_scales: bool = False
    beside: Mapping[str, LayerScheme] = field(default_factory=dict)

    def is_ignored(self, module: str) -> bool:
        """Return whether a module, or a module that contains it, stays unquantized."""
        return any(covers(entry, module) for entry in self.ignore)

    def scheme_for(self, module: str) -> LayerScheme | None:
        """Return the scheme of a matrix by its full module name; None if it stays unquantized.

        Embeddings stay unquantized unless `beside` names them, which this does not know of other modules.
        """
        if module in self.beside:
            return self.beside[module]
        return None if self.is_ignored(module) else self.overrides.get(module, self.scheme)

    def reading(self) -> dict[str, Any]:
        """Return the JSON values on which the meaning of the tensors depends: all except fingerprint and recipe."""
        return {
            "quant_method": QUANT_METHOD,
            "format_version": FORMAT_VERSION,
            **self.scheme.to_dict(),
            "ignore": list(self.ignore),
            "overrides": {name: scheme.to_dict() for name, scheme in self.overrides.items()},
            **({"beside": {name: scheme.to_dict() for name, scheme in self.beside.items()}} if self.beside else {}),
            **({"kv_cache_scheme": KV_CACHE_SCHEME} if self.has_kv_scales else {}),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the whole config as JSON values."""
        return {**self.reading(), "fingerprint": self.fingerprint, "recipe": dict(self.recipe)}

    @classmethod
    def from_dict(cls, config: Any, where: str = CONFIG_KEY) -> "CheckpointConfig":
        """Parse and validate a JSON object; raise ConfigError for anything this version does not know."""
        if not isinstance(config, Mapping):
            raise ConfigError(where, "an object", type(config).__name__)
        if config.get("quant_method") != QUANT_METHOD:
            hint = "This is a checkpoint of another tool, or an export: use the checkpoint that `latq quantize` wrote."
            raise ConfigError(f"{where}.quant_method", repr(QUANT_METHOD), repr(config.get("quant_method")), hint)
        version = config.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            hint = "Use the release of vllm-latq that wrote this checkpoint, or quantize again."
            raise ConfigError(f"{where}.format_version", str(FORMAT_VERSION), repr(version), hint)
        _refuse_unknown(config, _CONFIG_KEYS, where)
        ignore = config.get("ignore", [])
        if not isinstance(ignore, list | tuple) or not all(isinstance(entry, str) and entry for entry in ignore):
            raise ConfigError(f"{where}.ignore", "a list of module names, none of them empty", repr(ignore))
        fingerprint, recipe = config.get("fingerprint", ""), config.get("recipe", {})
        if not isinstance(fingerprint, str):
            raise ConfigError(f"{where}.fingerprint", "a string", repr(fingerprint))
        if not isinstance(recipe, Mapping):
            raise ConfigError(f"{where}.recipe", "an object", repr(recipe))
        if config.get("kv_cache_scheme", KV_CACHE_SCHEME) != KV_CACHE_SCHEME:
            raise ConfigError(f"{where}.kv_cache_scheme", str(KV_CACHE_SCHEME), repr(config["kv_cache_scheme"]))
        return cls(
            scheme=_parse_scheme({key: config[key] for key in SCHEME_KEYS if key in config}, where),
            ignore=tuple(ignore),
            overrides=_parse_schemes(config.get("overrides", {}), f"{where}.overrides"),
            beside=_rounded_schemes(config.get("beside", {}), f"{where}.beside"),
            fingerprint=fingerprint,
            recipe=dict(recipe),
            has_kv_scales="kv_cache_scheme" in config,
        )


def covers(entry: str, module: str) -> bool:
    """Return whether an entry of `ignore` covers a module: its full name, a dotted suffix, or a module around it."""
    return f".{module}".endswith(f".{entry}") or module.startswith(f"{entry}.")


def redirections(config: Any) -> list[tuple[dict[str, Any], str]]:
    """Return each key of a config.json that redirects loading to other files, with the object that has the key."""
    return [
        (part, key)
        for part in _objects(config)
        for key in REDIRECTING_KEYS
        if part.get(key, NEEDS_IMPORT) != NEEDS_IMPORT
    ]


def without_note(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without the keys that make transformers ask for this package."""
    values = json.loads(json.dumps(config))
    for part in _objects(values):
        for key in REDIRECTING_KEYS:
            part.pop(key, None)
    return dict(values)


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield a JSON object and every object inside it."""
    if isinstance(value, dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in inner:
        yield from _objects(part)


def _rounded_schemes(value: Any, where: str) -> dict[str, LayerScheme]:
    """Parse and validate the schemes of `beside`."""
    schemes = _parse_schemes(value, where)
    for name, scheme in schemes.items():
        if scheme.encoding != "packed" or scheme.outliers:
            raise ConfigError(f"{where}[{name!r}]", "encoding packed, without outliers", str(scheme))
    return schemes


def _parse_schemes(value: Any, where: str) -> dict[str, LayerScheme]:
    """Parse and validate an object of schemes."""
    if not isinstance(value, Mapping):
        raise ConfigError(where, "an object", type(value).__name__)
    return {name: _parse_scheme(scheme, f"{where}[{name!r}]") for name, scheme in value.items()}


def _parse_scheme(value: Any, where: str) -> LayerScheme:
    """Parse and validate the scheme at `where`."""
    if not isinstance(value, Mapping) or "encoding" not in value:
        raise ConfigError(where, "an object with `encoding`", repr(value))
    _refuse_unknown(value, SCHEME_KEYS, where)
    try:
        scheme = LayerScheme(**value)
        encoding_of(scheme)
    except ConfigError as error:  # the error names the place of the model's own scheme
        place = where + error.where.removeprefix(CONFIG_KEY)
        raise ConfigError(place, error.expected, error.found, error.hint) from None
    return scheme


def _refuse_unknown(value: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Raise ConfigError for keys that are not known."""
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise ConfigError(where, f"keys among {', '.join(known)}", f"unknown {', '.join(unknown)}")
