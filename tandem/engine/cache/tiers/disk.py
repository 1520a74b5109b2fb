"""The disk tier: KV pages as files, which a worker finds again when it restarts.

A page is a file in a folder that only workers with the same model, dtypes and page layout use, and of these only the
worker of one name. The file has the bytes of the page, then its digest, group and checksum. It is written under another
name and then renamed, so that a file with a final name is complete unless the machine has crashed; a file that is not
complete or was changed has another size, digest or checksum, is deleted, and its tokens are computed again.
"""

import contextlib
import hashlib
import logging
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

from tandem.engine.cache.page_key import PageKey
from tandem.engine.cache.tiers.tier import Fill, StoredPage, Tier
from tandem.engine.memory import GIB
from tandem.protocol.errors import FailedPrecondition, InvalidArgument
from tandem.protocol.page_digests import DIGEST_BYTES
from tandem.protocol.prefixes import KvTier

log = logging.getLogger(__name__)

FORMAT = "1"
"""The version of the files' format; a new one has a new folder."""
_END = struct.Struct(f"<{DIGEST_BYTES}sIQ")
"""The end of a file: digest, group and checksum."""
_PART = ".part"
"""The suffix of files that are not complete."""
_LOCK = ".lock"
"""The name of the file whose lock the process holds that uses the folder."""


def model_folder(path: Path, worker_id: str, facts: Sequence[tuple[str, str]], page_bytes: int) -> Path:
    """Return the folder under `path` for the pages of one worker.

    `facts` are the properties, as (name, value), on which the contents of pages depend.
    """
    named = [*facts, ("page_bytes", str(page_bytes)), ("format", FORMAT)]
    digest = hashlib.blake2b(repr(sorted(named)).encode(), digest_size=DIGEST_BYTES).hexdigest()
    return path / digest / worker_id


class DiskTier(Tier[Path]):
    """Pages as files in `folder`, which is created. The location of a page is its file.

    The order of use is that of the files' modification times, so that it survives a restart.
    """

    def __init__(self, folder: Path, capacity_bytes: int, page_bytes: int) -> None:
        """Create the folder.

        Raises InvalidArgument, which names the setting to change, if the folder cannot be written, or if the disk is
        smaller than `capacity_bytes`.
        """
        super().__init__(KvTier.DISK, capacity_bytes, page_bytes + _END.size)
        self._folder = folder
        self._data_bytes = page_bytes
        self._lock: int | None = None
        """The descriptor of the locked file, while this process alone uses the folder."""
        total = disk_bytes(folder)
        if capacity_bytes > total:
            raise InvalidArgument(
                "kv_disk_bytes",
                f"{capacity_bytes / GIB:.2f} GiB exceed the {total / GIB:.2f} GiB of the disk of {folder}",
            )
        if not self.capacity:
            raise InvalidArgument(
                "kv_disk_bytes", f"{capacity_bytes} bytes hold no KV page, which takes {self.page_bytes} bytes"
            )

    def open(self) -> None:
        """Find the pages that an earlier process of this worker has stored; their contents are checked when read.

        Raises FailedPrecondition if another process uses the folder: each would delete files of the other, and both
        together would exceed the capacity.
        """
        self._lock = _lock(self._folder / _LOCK)
        found: list[tuple[int, PageKey, Path]] = []
        try:
            for file in os.scandir(self._folder):
                if file.name == _LOCK:
                    continue
                key = _key_of(file.name)
                if key is None:
                    os.unlink(file.path)
                else:
                    found.append((file.stat().st_mtime_ns, key, Path(file.path)))
        except OSError as error:
            self._failed("the folder of KV pages cannot be read", error)
        self._pages.update((key, path) for _, key, path in sorted(found))
        self._make_room(0)

    def store(self, keys: Sequence[PageKey], fill: Fill) -> None:
        """Store pages (`Tier.store`); `fill` is called for each page."""
        for key in keys:
            buffer = torch.empty(self._data_bytes, dtype=torch.uint8)
            checksum = fill([buffer])[0]
            if checksum is None:
                continue
            self._make_room(1)
            path = self._folder / f"{key.digest.hex()}-{key.group}"
            part = path.with_name(f"{path.name}.{os.getpid()}{_PART}")
            try:
                with part.open("wb", buffering=0) as file:
                    _write(file.fileno(), [memoryview(buffer.numpy().data), memoryview(_END.pack(*key, checksum))])
                part.replace(path)
            except OSError as error:
                self._failed("a KV page cannot be written", error)
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
                continue
            self._put(key, path)
            self.counts.stored_pages += 1

    def read(self, key: PageKey) -> StoredPage | None:
        """Return a stored page (`Tier.read`). A file that is not one of this page is deleted."""
        path = self._pages.get(key)
        if path is None:
            return None
        content = bytearray(self.page_bytes + 1)
        try:
            with path.open("rb", buffering=0) as file:
                size = _read_into(file.fileno(), memoryview(content))
        except OSError as error:
            self._failed("a KV page cannot be read", error)
            self.discard(key)
            return None
        digest, group, checksum = _END.unpack_from(content, self._data_bytes)
        if size != self.page_bytes or PageKey(digest, group) != key:
            self.counts.corrupt_pages += 1
            self.discard(key)
            return None
        self.touch(key)
        with contextlib.suppress(OSError):  # the disk may be read-only; only the order after a restart depends on it
            os.utime(path)
        return StoredPage(torch.frombuffer(content, dtype=torch.uint8, count=self._data_bytes), checksum)

    def discard(self, key: PageKey) -> None:
        """Delete a page, if it is stored."""
        path = self._pop(key)
        if path is None:
            return
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._failed("a KV page cannot be deleted", error)

    def close(self) -> None:
        """Release the folder; its files stay."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _make_room(self, pages: int) -> None:
        """Delete the least recently used pages until `pages` more pages fit."""
        while self._pages and len(self._pages) + pages > self.capacity:
            self.discard(next(iter(self._pages)))
            self.counts.evicted_pages += 1

    def _failed(self, what: str, error: OSError) -> None:
        # Logged once: a full or lost disk fails for every page.
        if not self.counts.failures:
            log.warning("%s (%s); its tokens will be computed again", what, error)
        self.counts.failures += 1


def disk_bytes(path: Path) -> int:
    """Return the size of the disk of a folder, which is created if it is missing.

    Raises InvalidArgument if the folder cannot be written.
    """
    try:
        # Only this user may enter it, because the text of prompts can be reconstructed from their KV.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path):
            return shutil.disk_usage(path).total
    except OSError as error:
        raise InvalidArgument(
            "kv_disk_path", f"{path} cannot be written ({error.strerror}); choose a folder that workers may write"
        ) from error


def _lock(path: Path) -> int:
    """Lock a file, which is created, and return its descriptor; the lock ends when it is closed, or with the process.

    Raises FailedPrecondition if another process has locked it.
    """
    import fcntl  # which Windows lacks, where plans and simulations run too

    file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if not isinstance(error, BlockingIOError):
            raise
        raise FailedPrecondition(
            f"another process uses the KV pages in {path.parent}; start one of the clusters with another --kv-disk-path"
        ) from None
    return file


def _key_of(name: str) -> PageKey | None:
    digest, _, group = name.partition("-")
    try:
        key = PageKey(bytes.fromhex(digest), int(group))
    except ValueError:
        return None
    return key if len(key.digest) == DIGEST_BYTES and name == f"{key.digest.hex()}-{key.group}" else None


def _write(file: int, parts: Sequence[memoryview]) -> None:
    """Write all of `parts`; a write may be short."""
    for part in parts:
        start = 0
        while start < len(part):
            start += os.write(file, part[start:])


def _read_into(file: int, content: memoryview) -> int:
    """Read until the end of the file or of `content`, and return the number of bytes."""
    size = 0
    while size < len(content) and (more := os.readv(file, [content[size:]])):
        size += more
    return size
