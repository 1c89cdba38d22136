"""What people type on the command line, read strictly."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def assignments(texts: list[str]) -> Iterator[tuple[str, Any]]:
    """key=value pairs; a value that is no JSON is a string."""
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ValueError(f"--set {text!r}: expected KEY=VALUE")
        try:
            yield key, json.loads(value)
        except json.JSONDecodeError:
            yield key, value


def token_ids(text: str) -> list[int]:
    """Whole numbers, apart by blanks or commas."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--prompt {text!r}: expected token ids, such as '1 2 3'") from None


def prompts_of(file: Path) -> Iterator[list[int]]:
    """One prompt a line of a JSONL file; blank lines are passed over."""
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{file}, line {number}: not JSON: {error}") from None
        ids = value.get("prompt") if isinstance(value, dict) else value
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise ValueError(f"{file}, line {number}: expected a list of token ids, got {line!r}")
        yield ids
