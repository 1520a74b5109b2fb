"""Checksums of pages in GPU memory, computed in parallel with the engine's steps.

`page_checksums` imports this module on GPUs only, because it imports Triton, which CPU installations lack.
"""

from collections.abc import Sequence

import torch

from tandem.engine.cache.page_words import PageWords
from tandem.engine.device_wait import wait_for
from tandem.engine.kernels.rowwise.triton_checksum import SPLITS, partial_sums

_MOST_PAGES = 64
"""Maximum number of pages whose checksums one kernel launch computes."""
_MASK = (1 << 64) - 1


class DeviceChecksums:
    """`GroupSums` on a GPU, on a separate stream: checksums and the engine's steps do not wait for each other.

    Only the calling thread waits: it spins briefly, then sleeps. The constructor compiles the kernel and allocates all
    memory.
    """

    def __init__(self, words: PageWords) -> None:
        """Prepare the checksums of `words`, which `as_words` returned for a cache on a GPU."""
        self._words, device = words, words.words.device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._chosen = torch.zeros(_MOST_PAGES, 2, dtype=torch.int64, device=device)
        self._parts = torch.zeros(_MOST_PAGES, SPLITS, dtype=torch.int64, device=device)
        self._chosen_here = torch.zeros(_MOST_PAGES, 2, dtype=torch.int64, pin_memory=True)
        self._parts_here = torch.zeros(_MOST_PAGES, SPLITS, dtype=torch.int64, pin_memory=True)
        torch.cuda.synchronize(device)
        self([0], [0])

    def __call__(self, pages: Sequence[int], filled: Sequence[int]) -> Sequence[int]:
        """Return the checksum of the first `filled` token positions of each page.

        Raises IndexError if a page number is outside the pool.
        """
        chosen = list(zip(pages, filled, strict=True))
        count = len(self._words.words)
        outside = [page for page in pages if not 0 <= page < count]
        if outside:
            raise IndexError(f"page {outside[0]} of a pool of {count}")
        sums: list[int] = []
        for first in range(0, len(chosen), _MOST_PAGES):
            sums += self._sum(chosen[first : first + _MOST_PAGES])
        return sums

    def _sum(self, chosen: Sequence[tuple[int, int]]) -> list[int]:
        count = len(chosen)
        self._chosen_here.numpy()[:count] = chosen
        # The current device is a property of each thread; entering the stream's context sets it for this one.
        with torch.cuda.stream(self._stream):
            self._chosen[:count].copy_(self._chosen_here[:count], non_blocking=True)
            words = self._words
            partial_sums(
                words.words,
                words.page_tokens * words.token_words,
                words.token_words,
                self._chosen[:count],
                self._parts[:count],
                numbering=(words.first_number, words.head_words, words.head_gap),
            )
            self._parts_here[:count].copy_(self._parts[:count], non_blocking=True)
            self._done.record()
        wait_for(self._done)
        return [total & _MASK for total in self._parts_here.numpy()[:count].sum(axis=1).tolist()]
