"""Host memory for copies of KV pages: one allocation, pinned if the page pool is on a GPU."""

import logging
import mmap
from typing import Any

import torch

log = logging.getLogger(__name__)


class HostMemory:
    """Memory with a row for each page; `close` frees it."""

    def __init__(self, rows: int, page_bytes: int, device: torch.device, shared: int | None = None) -> None:
        """Allocate `rows` rows, for a page pool on `device`, or map those of the file `shared`, a descriptor.

        Pinning takes about 0.2 s per GiB; without it, copies are slower.
        """
        size = rows * page_bytes
        if shared is None:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(shared, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.rows = torch.frombuffer(memory, dtype=torch.uint8).view(rows, page_bytes)
        """The rows, [rows, page bytes] uint8."""
        self._pinned = device.type == "cuda" and self._pin(size, device)

    def _pin(self, size: int, device: torch.device) -> bool:
        try:
            # The current device is a property of each thread. Not `pin_memory`, which rounds up to a power of two.
            with torch.cuda.device(device):
                torch.cuda.check_error(_cudart().cudaHostRegister(self.rows.data_ptr(), size, 0))
        except RuntimeError as error:
            log.warning("the host memory of KV pages is not pinned, so copies are slow: %s", error)
            return False
        return True

    def close(self) -> None:
        """Free the memory. Idempotent."""
        if self._pinned:
            torch.cuda.check_error(_cudart().cudaHostUnregister(self.rows.data_ptr()))
            self._pinned = False
        self.rows = torch.empty(0, self.rows.shape[1], dtype=torch.uint8)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
