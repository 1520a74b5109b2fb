"""The pages of the prefix cache that are to be copied into a tier before the pool evicts them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from tandem.engine.cache.page_key import PageKey


@dataclass(slots=True, eq=False)
class PendingSave:
    """A page that is to be saved or is being copied."""

    page: int
    key: PageKey


class PendingSaves:
    """The pages to save, oldest first, and those that are being copied. Guarded by the pool's lock.

    A copy does not own its page, so that no allocation waits for it: the pool may evict the page at any moment. An
    indexed page is never written, and an evicted page is written only after `evicted`, so a copy is that of the page's
    digest if the page was not evicted before the copy ended (`finish`).
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """Create an empty list; `wake` is called when a page is added to it, and must return at once."""
        self._wake = wake
        self._waiting: dict[int, PendingSave] = {}
        self._copying: dict[int, PendingSave] = {}

    def add(self, page: int, key: PageKey) -> None:
        """Add a page that no request reads any longer, unless it waits or is being copied."""
        if page in self._waiting or page in self._copying:
            return
        if not self._waiting:
            self._wake()
        self._waiting[page] = PendingSave(page, key)

    def evicted(self, page: int) -> None:
        """Drop a page that the pool has evicted."""
        self._waiting.pop(page, None)
        self._copying.pop(page, None)

    def __len__(self) -> int:
        """Return the number of waiting pages."""
        return len(self._waiting)

    def take(self, most: int) -> list[PendingSave]:
        """Return the oldest waiting pages, at most `most`, which are copied next; `finish` ends each copy."""
        taken = list(islice(self._waiting.values(), most))
        for save in taken:
            del self._waiting[save.page]
            self._copying[save.page] = save
        return taken

    def finish(self, save: PendingSave) -> bool:
        """End a copy; return True if the page was not evicted meanwhile, so that the copy has the page's contents."""
        if self._copying.get(save.page) is not save:
            return False
        del self._copying[save.page]
        return True
