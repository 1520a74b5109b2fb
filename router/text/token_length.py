"""A lower bound of the number of tokens of a prompt, from the maximum number of bytes that one token can represent.

With this bound, a prompt that cannot fit the context is rejected without being tokenized.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend"})
"""Normalizers that drop no text. NFKC shortens text the most: the four bytes of "𝐀" become the one byte of "A"."""
_SHRINK_MAX = 4
_WHOLE_SPLITS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "UnicodeScripts"})
"""Pre-tokenizers that drop no text, unless they are configured to remove the text at which they split."""


@dataclass(frozen=True, slots=True)
class TokenLength:
    """The maximum number of bytes of text that one token of a tokenizer represents."""

    bytes_max: int = 0
    """Maximum number of bytes of text that one token represents; 0 if no maximum is known."""
    unknown: bytes = b""
    """The bytes for which there is no token; the tokenizer may drop them."""

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of `text`; 0 if the maximum length of a token is unknown."""
        return len(text.encode().translate(None, self.unknown)) // self.bytes_max if self.bytes_max else 0


def token_length(tokenizer: Any, tokens: Iterable[bytes], byte_of: dict[str, int]) -> TokenLength:
    """Return the maximum number of bytes of text that one token of a tokenizer represents.

    The tokenizer is one of the `tokenizers` library. `tokens` are the bytes of all tokens; `byte_of` maps the
    characters of byte-level tokenizers to bytes. The maximum is unknown (0) if a stage of the tokenizer may drop text,
    or if one token may represent any amount of text.
    """
    unknown = _unknown_bytes(tokenizer, byte_of)
    if unknown is None or any(a.lstrip or a.rstrip for a in tokenizer.get_added_tokens_decoder().values()):
        return TokenLength()
    normalizers = list(_parts(tokenizer.normalizer, "normalizers"))
    splits = list(_parts(tokenizer.pre_tokenizer, "pretokenizers"))
    if not all(part["type"] in _UNICODE_FORMS or _replaces_by_more(part) for part in normalizers):
        return TokenLength()
    if not all(part["type"] in _WHOLE_SPLITS and part.get("behavior") != "Removed" for part in splits):
        return TokenLength()
    shrinks = bool(normalizers) or any(part["type"] == "Metaspace" for part in splits)
    return TokenLength(max(map(len, tokens), default=0) * (_SHRINK_MAX if shrinks else 1), unknown)


def _unknown_bytes(tokenizer: Any, byte_of: dict[str, int]) -> bytes | None:
    """Return the bytes for which there is no token; None if the tokenizer has no byte fallback."""
    if not isinstance(tokenizer.model, tokenizers.models.BPE):
        return None
    if any(part["type"] == "ByteLevel" for part in _parts(tokenizer.pre_tokenizer, "pretokenizers")):
        return bytes(byte for sign, byte in byte_of.items() if tokenizer.token_to_id(sign) is None)
    if not tokenizer.model.byte_fallback:
        return None
    spelled = all(tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return b"" if spelled else None


def _replaces_by_more(part: dict[str, Any]) -> bool:
    pattern = part.get("pattern", {}).get("String") if part["type"] == "Replace" else None
    return bool(pattern) and len(part["content"].encode()) >= len(str(pattern).encode())


def _parts(component: Any, inner: str) -> Iterator[dict[str, Any]]:
    """Yield the components of a normalizer or pre-tokenizer in the form of tokenizer.json."""
    if component is None:
        return
    state: dict[str, Any] = json.loads(component.__getstate__())
    yield from state[inner] if state["type"] == "Sequence" else (state,)
