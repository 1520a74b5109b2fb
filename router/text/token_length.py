"""How much text one token can stand for, which bounds a prompt's tokens before it is tokenized."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tokenizers

_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend"})
"""Normalizers that leave no text out. NFKC shortens most: the four bytes of "𝐀" become the one of "A"."""
_SHRINK_MAX = 4
_WHOLE_SPLITS = frozenset({"ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "UnicodeScripts"})
"""Pre-tokenizers that leave no text out, unless they are told to remove what they split at."""


@dataclass(frozen=True, slots=True)
class TokenLength:
    """What bounds the number of tokens of a text from below."""

    bytes_max: int = 0
    """The most bytes of a text that one token stands for; 0 = there is no such bound."""
    unknown: bytes = b""
    """Bytes without a token, which the tokenizer may leave out."""

    def fewest_tokens(self, text: str) -> int:
        """No encoding of `text` has fewer tokens; 0 where nothing is known."""
        return len(text.encode().translate(None, self.unknown)) // self.bytes_max if self.bytes_max else 0


def token_length(tokenizer: Any, tokens: Iterable[bytes], byte_of: dict[str, int]) -> TokenLength:
    """The bound of a tokenizer of this library. `tokens` are all tokens' bytes, `byte_of` is how byte-level tokenizers
    write bytes. None is known where something between text and tokens may leave any text out, or where one token may
    stand for any amount of it.
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
    """Bytes that have no token; None if it does not fall back to bytes for what it does not know."""
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
    """What a normalizer or pre-tokenizer consists of, as tokenizer.json writes it."""
    if component is None:
        return
    found: dict[str, Any] = json.loads(component.__getstate__())
    yield from found[inner] if found["type"] == "Sequence" else (found,)
