"""Which number format a checkpoint's config gives each linear: ModelOpt's quantization settings.

ModelOpt writes them as hf_quant_config.json beside config.json, or into config.json as `quantization_config`. They name
either one algorithm for all linears but some (`exclude_modules` or `ignore`, with wildcards), or MIXED_PRECISION and an
entry for each quantised module (`quantized_layers`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

ALGORITHMS = {"FP8": "fp8_tensor", "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4"}
"""Name in a config -> weight format. NVFP4 is read as W4A16: weights of 4 bits, activations as they are."""
MIXED = "MIXED_PRECISION"
METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed")
GROUP = 16
PREFIXES = ("backbone.", "model.")
FP8_CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}


@dataclass(frozen=True)
class Quantization:
    """What a config says. layers: module -> format, stated one by one. algorithm: of every linear that no pattern of
    `excluded` names. kv_cache: None (as the activations are) or "FP8"."""

    layers: Mapping[str, str] = field(default_factory=dict)
    algorithm: str | None = None
    excluded: tuple[str, ...] = ()
    kv_cache: str | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any] | None, source: str) -> "Quantization":
        """Read a `quantization_config` of config.json, or the `quantization` of hf_quant_config.json.

        Raises ValueError naming source, key and value for what this house cannot run.
        """
        if raw is None:
            return cls()
        for key, value in raw.items():
            if key not in KEYS:
                raise ValueError(
                    f"{source}: quantization: unknown key {key!r} = {value!r}; known: {', '.join(KEYS)}"
                )
        method = raw.get("quant_method", "modelopt")
        if method not in METHODS:
            raise ValueError(f"{source}: quant_method = {method!r}; only 'modelopt' is known here")
        entries = raw.get("quantized_layers") or {}
        if not isinstance(entries, Mapping):
            raise ValueError(f"{source}: quantized_layers = {entries!r}, expected an object")
        layers = {
            plain(module): _format(entry, f"{source}: {module}")
            for module, entry in entries.items()
        }
        algorithm = raw.get("quant_algo")
        if algorithm == MIXED:
            if not layers:
                raise ValueError(f"{source}: quant_algo = {MIXED!r} needs quantized_layers")
            algorithm = None
        elif algorithm is not None:
            algorithm = _format(raw, source)
            if layers:
                raise ValueError(f"{source}: quantized_layers and quant_algo = {algorithm!r}")
        patterns = raw.get("exclude_modules", raw.get("ignore")) or ()
        if isinstance(patterns, str) or not all(isinstance(p, str) for p in patterns):
            raise ValueError(f"{source}: exclude_modules = {patterns!r}, expected a list of names")
        return cls(layers, algorithm, tuple(map(plain, patterns)), _kv_cache(raw, source))

    def stated(self, module: str) -> str | None:
        """The format of a linear: the one that the config states for it, bfloat16 where it quantises nothing of the
        kind; None where it only gives a pattern: then the tensors in the file decide."""
        if self.algorithm is not None:
            return None
        return self.layers.get(plain(module), "bfloat16")

    def expected(self, module: str) -> str:
        """The format of a linear as far as the config tells, patterns included."""
        if self.algorithm is None:
            return self.layers.get(plain(module), "bfloat16")
        return "bfloat16" if self._excludes(plain(module)) else self.algorithm

    def difference(self, other: "Quantization") -> tuple[str, Any, Any] | None:
        """The first module or key in which another config says something else, and what each says; None: they agree."""
        for key in ("algorithm", "kv_cache"):
            mine, theirs = getattr(self, key), getattr(other, key)
            if mine != theirs:
                return key, mine, theirs
        for module in {**self.layers, **other.layers}:
            formats = self.layers.get(module), other.layers.get(module)
            if formats[0] != formats[1]:
                return module, *formats
        for pattern in sorted(set(self.excluded) ^ set(other.excluded)):
            has = pattern in self.excluded
            return pattern, *(("excluded", None) if has else (None, "excluded"))
        return None

    def _excludes(self, module: str) -> bool:
        """Whether a pattern names the module or one that it is part of."""
        parts = module.split(".")
        owners = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        exact, wild = self._patterns
        return any(owner in exact for owner in owners) or any(
            fnmatchcase(module, pattern) for pattern in wild
        )

    @cached_property
    def _patterns(self) -> tuple[set[str], tuple[str, ...]]:
        wild = tuple(p for p in self.excluded if any(c in p for c in "*?["))
        return set(self.excluded) - set(wild), wild


KEYS = (
    "quant_method",
    "quant_algo",
    "quantized_layers",
    "exclude_modules",
    "ignore",
    "group_size",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "config_groups",
    "producer",
    "four_over_six",
)


def plain(module: str) -> str:
    """A module's name without what exporters put before it."""
    for prefix in PREFIXES:
        module = module.removeprefix(prefix)
    return module


def _format(entry: Any, where: str) -> str:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: {entry!r}, expected an object with quant_algo")
    algorithm = entry.get("quant_algo")
    if algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ValueError(f"{where}: quant_algo = {algorithm!r}; known: {known}, {MIXED}")
    name = ALGORITHMS[algorithm]
    if name == "nvfp4":
        group = entry.get("group_size", GROUP)
        if group != GROUP:
            raise ValueError(f"{where}: group_size = {group!r}, NVFP4 has groups of {GROUP}")
        if entry.get("four_over_six"):
            return "nvfp4_four_over_six"
    return name


def _kv_cache(raw: Mapping[str, Any], source: str) -> str | None:
    algorithm, scheme = raw.get("kv_cache_quant_algo"), raw.get("kv_cache_scheme")
    if scheme not in (None, "FP8"):
        static = isinstance(scheme, Mapping) and not scheme.get("dynamic")
        if not static or (scheme.get("num_bits"), scheme.get("type")) != (8, "float"):
            raise ValueError(f"{source}: kv_cache_scheme = {scheme!r}; only static FP8 is known")
    if scheme is not None:
        algorithm = algorithm or "FP8"
    if algorithm not in (None, "FP8"):
        raise ValueError(f"{source}: kv_cache_quant_algo = {algorithm!r}; known: FP8, null")
    return algorithm


def is_modelopt(config: Any) -> bool:
    """Whether a `quantization_config` is of ModelOpt's kind, which `Quantization` reads."""
    return isinstance(config, Mapping) and config.get("quant_method", "modelopt") in METHODS


def quantization_config(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The `quantization_config` of config.json that says what an hf_quant_config.json says."""
    said = content.get("quantization")
    if not isinstance(said, Mapping):
        raise ValueError(f"{source}: quantization = {said!r}, expected an object")
    config = {"ignore" if key == "exclude_modules" else key: value for key, value in said.items()}
    if config.get("kv_cache_quant_algo") == "FP8":
        config["kv_cache_scheme"] = FP8_CACHE
    producer = {"producer": content["producer"]} if "producer" in content else {}
    return {"quant_method": "modelopt", **config, **producer}


def hf_quant_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The content of hf_quant_config.json that says what a `quantization_config` says."""
    moved = {"ignore": "exclude_modules"}
    dropped = ("quant_method", "producer", "config_groups", "kv_cache_scheme")
    quantization = {moved.get(k, k): v for k, v in config.items() if k not in dropped}
    if quantization.get("kv_cache_quant_algo") is None:
        quantization["kv_cache_quant_algo"] = _kv_cache(config, "quantization_config")
    producer = config.get("producer", {"name": "unified_models"})
    return {"producer": producer, "quantization": quantization}
