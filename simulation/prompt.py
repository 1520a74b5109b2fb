"""Prompts without tokens: as long as they say, and known by the names of their pages."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from wire.page_digests import DIGEST_BYTES

Segment = tuple[int, int, int]
"""A run of tokens: what it is a part of, where that part begins, and how many there are."""


class VirtualPrompt(Sequence[int]):
    """Equal `names` mean equal tokens, as far as both reach. Its token ids are 0 and stand for nothing."""

    __slots__ = ("key", "names", "tokens")

    def __init__(self, key: int, tokens: int, names: tuple[bytes, ...]) -> None:
        """`names` of the full pages; `key` tells it from all others."""
        self.key, self.tokens, self.names = key, tokens, names

    def __len__(self) -> int:
        return self.tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return (0,) * len(range(*index.indices(self.tokens)))
        if not -self.tokens <= index < self.tokens:
            raise IndexError(index)
        return 0

    def __add__(self, answer: tuple[int, ...]) -> "VirtualPrompt":
        """With the first tokens of an answer behind it, which are nobody else's."""
        return VirtualPrompt(self.key, self.tokens + len(answer), self.names) if answer else self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """What is hashed where the whole prompt is stamped."""
        return np.array([self.key, self.tokens], dtype=dtype)


def page_names(segments: Sequence[Segment], page_tokens: int) -> tuple[bytes, ...]:
    """Names of the full pages of a prompt: equal for equal beginnings, whoever asks."""
    names, parent, room, page = [], b"", page_tokens, bytearray()
    for key, begin, tokens in segments:
        first, count = begin, tokens
        while count >= room:
            page += np.array((key, first, room), dtype="<i8").tobytes()
            parent = blake2b(parent + page, digest_size=DIGEST_BYTES).digest()
            names.append(parent)
            first, count, room, page = first + room, count - room, page_tokens, bytearray()
        if count:
            page += np.array((key, first, count), dtype="<i8").tobytes()
            room -= count
    return tuple(names)


class PageNames:
    """Names pages as `wire.page_digests` does, without looking at tokens: a prompt knows its names, and what was
    generated has some that nobody will ask for.
    """

    def __init__(self) -> None:
        self._made = 0

    def __call__(self, token_ids: Sequence[int], page_tokens: int, _parent: bytes) -> list[bytes]:
        if isinstance(token_ids, VirtualPrompt):
            return list(token_ids.names)
        fresh = range(self._made, self._made + len(token_ids) // page_tokens)
        self._made = fresh.stop
        return [number.to_bytes(DIGEST_BYTES, "little") for number in fresh]
