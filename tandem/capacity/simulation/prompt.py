"""Simulated prompts: without token ids, but with a length and the names of their pages."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tandem.protocol.page_digests import DIGEST_BYTES

Segment = tuple[int, int, int]
"""A run of prompt tokens from one source: the source's key, the offset in the source, and the number of tokens."""


class VirtualPrompt(Sequence[int]):
    """A prompt whose token ids are all 0; the prefix cache matches its pages by their `names`."""

    __slots__ = ("key", "names", "tokens")

    def __init__(self, key: int, tokens: int, names: tuple[bytes, ...]) -> None:
        """Create a prompt of `tokens` tokens with the `names` of its full pages; `key` is unique."""
        self.key, self.tokens, self.names = key, tokens, names

    def __len__(self) -> int:
        return self.tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        """Return 0, or a tuple of zeros for a slice."""
        if isinstance(index, slice):
            return (0,) * len(range(*index.indices(self.tokens)))
        if not -self.tokens <= index < self.tokens:
            raise IndexError(index)
        return 0

    def __add__(self, answer: tuple[int, ...]) -> "VirtualPrompt":
        """Return the prompt followed by the generated tokens `answer`.

        The names stay those of the prompt's full pages, so no other prompt can share pages that contain tokens of
        `answer`.
        """
        return VirtualPrompt(self.key, self.tokens + len(answer), self.names) if answer else self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return an array that identifies the prompt, for hashing it."""
        return np.array([self.key, self.tokens], dtype=dtype)


def page_names(segments: Sequence[Segment], page_tokens: int) -> tuple[bytes, ...]:
    """Return the names of a prompt's full pages; prompts that begin with the same tokens have the same first names."""
    names, parent, missing, page = [], b"", page_tokens, bytearray()
    for key, begin, tokens in segments:
        first, count = begin, tokens
        while count >= missing:
            page += np.array((key, first, missing), dtype="<i8").tobytes()
            parent = blake2b(parent + page, digest_size=DIGEST_BYTES).digest()
            names.append(parent)
            first, count, missing, page = first + missing, count - missing, page_tokens, bytearray()
        if count:
            page += np.array((key, first, count), dtype="<i8").tobytes()
            missing -= count
    return tuple(names)


class PageNames:
    """Names full pages for the prefix cache, like `tandem.protocol.page_digests` but without token ids.

    A prompt has the names of its own pages; pages of generated tokens get unique names.
    """

    def __init__(self) -> None:
        self._made = 0

    def __call__(self, token_ids: Sequence[int], page_tokens: int, _parent: bytes) -> list[bytes]:
        """Return the names of the full pages: the prompt's own names, or unique ones for generated tokens."""
        if isinstance(token_ids, VirtualPrompt):
            return list(token_ids.names)
        fresh = range(self._made, self._made + len(token_ids) // page_tokens)
        self._made = fresh.stop
        return [number.to_bytes(DIGEST_BYTES, "little") for number in fresh]
