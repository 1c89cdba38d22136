"""Reading config.json into a frozen dataclass: every key is a field, ignored by name with a reason, or refused."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

ALWAYS_IGNORED = {
    "_name_or_path": "provenance",
    "architectures": "the registry reads model_type",
    "auto_map": "no remote code is run",
    "dtype": "tensors say their own dtype",
    "model_type": "read by the registry",
    "torch_dtype": "tensors say their own dtype",
    "transformers_version": "provenance",
    "use_cache": "a matter of the engine",
    "output_attentions": "a matter of the caller",
    "output_hidden_states": "a matter of the caller",
    "return_dict": "a matter of the caller",
    "chunk_size_feed_forward": "a matter of the caller",
    "is_encoder_decoder": "always a decoder here",
    "id2label": "no classification head",
    "label2id": "no classification head",
    "problem_type": "no classification head",
}


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError names the file when it is not one."""
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def require(condition: bool, **values: Any) -> None:
    """ValueError naming every value unless the condition holds; for keys that contradict each other."""
    if not condition:
        told = ", ".join(f"{key} = {value!r}" for key, value in values.items())
        raise ValueError(f"config.json: contradiction or unsupported value: {told}")


def fields_from(
    cls: type[T],
    raw: Mapping[str, Any],
    *,
    fixed: Mapping[str, Any],
    ignored: Mapping[str, str],
    source: str = "config.json",
) -> T:
    """`cls(**raw)` with types checked.

    fixed: keys that may be given with one value only; ignored: keys left out, each with its reason. Raises ValueError
    naming the key and its value: unknown (with the nearest known one), missing, of the wrong type, or another value
    of a fixed key.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    kept = {key: value for key, value in raw.items() if key in known}
    for key, value in raw.items():
        if key in fixed:
            if value != fixed[key]:
                raise ValueError(
                    f"{source}: {key} = {value!r}; only {fixed[key]!r} is known to this architecture"
                )
        elif key not in known and key not in ignored and key not in ALWAYS_IGNORED:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{source}: unknown key {key!r} = {value!r}{hint}")
    for name, field in known.items():
        if name not in kept and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{source}: missing key {name!r}")
    try:
        return msgspec.convert(kept, type=cls, strict=True)
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"{source}: {error}") from None
