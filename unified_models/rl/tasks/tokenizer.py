"""Text as bytes: token i is byte i for i below 256, and one token more ends an answer."""

from collections.abc import Sequence

EOS = 256
"""The end of an answer."""
SIZE = 257
"""The least vocabulary; ids from here on are no text."""


def encode(text: str) -> list[int]:
    """The UTF-8 bytes of a text, as token ids."""
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    """The text of token ids; EOS is left out, and what is no text becomes U+FFFD, which no answer contains."""
    return b"".join(bytes([i]) if i < EOS else b"" if i == EOS else b"\xff" for i in ids).decode(
        errors="replace"
    )
