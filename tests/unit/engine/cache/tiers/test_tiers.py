"""The tiers by themselves: what they store comes back, or is missing, but never as another page."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.cache.page_key import PageKey
from tandem.engine.cache.tiers.disk import DiskTier, model_folder
from tandem.engine.cache.tiers.host import HostTier
from tandem.engine.cache.tiers.tier import Fill, MeasuredRate, Tier
from tandem.protocol.errors import FailedPrecondition, InvalidArgument

CPU = torch.device("cpu")
PAGE = 64
ON_DISK = PAGE + 28
"""The size of a page's file."""


def key(number: int, group: int = 0) -> PageKey:
    return PageKey(number.to_bytes(16, "big"), group)


def content(number: int) -> Tensor:
    return torch.full((PAGE,), number, dtype=torch.uint8)


def filling(*numbers: int | None) -> Fill:
    """Return the function that fills buffers with the contents of pages; the checksum is the number, None = evicted."""
    left = iter(numbers)

    def fill(buffers: Sequence[Tensor]) -> list[int | None]:
        sums = [next(left) for _ in buffers]
        for buffer, number in zip(buffers, sums, strict=True):
            buffer.copy_(content(0 if number is None else number))
        return sums

    return fill


def store(tier: Tier[Any], *numbers: int) -> None:
    tier.store([key(number) for number in numbers], filling(*numbers))


def check(tier: Tier[Any], number: int, *, there: bool = True) -> None:
    """Check that a page is stored with its contents, or that it is missing."""
    assert (key(number) in tier) is there
    page = tier.read(key(number))
    assert (page is not None) is there
    if page is not None:
        assert page.checksum == number
        assert torch.equal(page.data, content(number))


def host(pages: int = 3, *, next_tier: Tier[Any] | None = None) -> HostTier:
    tier = HostTier(pages * PAGE + PAGE - 1, PAGE, CPU)
    tier.next_tier = next_tier
    tier.open()
    return tier


def disk(folder: Path, pages: int = 3) -> DiskTier:
    tier = DiskTier(folder, pages * ON_DISK, PAGE)
    tier.open()
    return tier


@pytest.fixture(params=["host", "disk"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Tier[Any]]:
    return host if request.param == "host" else lambda: disk(tmp_path)


def test_the_least_recently_used_page_is_evicted(make: Callable[[], Tier[Any]]) -> None:
    tier = make()
    assert tier.capacity == 3
    store(tier, 1, 2)
    store(tier, 3)
    tier.touch(key(1))
    check(tier, 2)
    store(tier, 4)
    for number in (1, 2, 4):
        check(tier, number)
    check(tier, 3, there=False)
    assert (len(tier), tier.counts.stored_pages, tier.counts.evicted_pages, tier.counts.failures) == (3, 4, 1, 0)


def test_a_page_of_another_group_is_another_page(make: Callable[[], Tier[Any]]) -> None:
    tier = make()
    tier.store([key(1, 0), key(1, 1)], filling(5, 6))
    first, second = tier.read(key(1, 0)), tier.read(key(1, 1))
    assert first is not None
    assert second is not None
    assert (first.checksum, second.checksum) == (5, 6)
    assert tier.read(key(1, 2)) is None


def test_a_page_that_was_evicted_from_the_pool_meanwhile_is_not_stored(make: Callable[[], Tier[Any]]) -> None:
    tier = make()
    tier.store([key(1), key(2), key(3)], filling(1, None, 3))
    check(tier, 2, there=False)
    store(tier, 4)
    for number in (1, 3, 4):
        check(tier, number)
    tier.discard(key(3))
    tier.discard(key(3))
    check(tier, 3, there=False)
    store(tier, 5)
    assert len(tier) == 3


def test_more_pages_than_fit_at_once(make: Callable[[], Tier[Any]]) -> None:
    tier = make()
    store(tier, *range(1, 9))
    assert len(tier) == 3
    for number in range(1, 9):
        check(tier, number, there=key(number) in tier)


def test_host_memory_passes_its_pages_to_the_disk(tmp_path: Path) -> None:
    lower = disk(tmp_path, 10)
    tier = host(2, next_tier=lower)
    store(tier, 1, 2)
    assert not len(lower)
    store(tier, 3)
    check(lower, 1)
    store(tier, 1, 4)
    written = lower.counts.stored_pages
    # The disk has page 1 already.
    store(tier, 5, 6)
    assert lower.counts.stored_pages == written + 1
    for number in (1, 2, 3, 4):
        check(lower, number)
    tier.close()


def test_host_memory_writes_ahead_what_the_disk_does_not_have(tmp_path: Path) -> None:
    lower = disk(tmp_path, 10)
    tier = host(3, next_tier=lower)
    store(tier, 1, 2, 3)
    tier.discard(key(2))
    assert [tier.write_ahead() for _ in range(4)] == [True, True, False, False]
    for number in (1, 2, 3):
        check(lower, number, there=number != 2)
    store(tier, 4, 5, 6)
    # Evicting pages 1 and 3 has written nothing.
    assert (lower.counts.stored_pages, tier.counts.evicted_pages) == (2, 2)
    assert not host().write_ahead()


def test_a_restarted_worker_finds_its_files_in_their_order(tmp_path: Path) -> None:
    first = disk(tmp_path)
    store(first, 1, 2, 3)
    for age, number in enumerate((2, 3, 1)):
        os.utime(tmp_path / f"{key(number).digest.hex()}-0", (1000 + age, 1000 + age))
    (tmp_path / "0011-0.77.part").write_bytes(b"half a page")
    first.close()
    again = disk(tmp_path)
    assert len(again) == 3
    assert not list(tmp_path.glob("*.part"))
    store(again, 4)
    check(again, 2, there=False)
    for number in (1, 3, 4):
        check(again, number)
    again.close()
    assert len(disk(tmp_path, 2)) == 2
    assert len(list(tmp_path.glob("*-0"))) == 2


@pytest.mark.parametrize("size", [0, PAGE, ON_DISK - 1, ON_DISK + 1])
def test_a_file_of_another_size_is_missing_and_deleted(tmp_path: Path, size: int) -> None:
    tier = disk(tmp_path)
    store(tier, 1)
    path = tmp_path / f"{key(1).digest.hex()}-0"
    path.write_bytes((path.read_bytes() + b"x")[:size])
    tier.close()
    again = disk(tmp_path)
    assert again.read(key(1)) is None
    assert again.counts.corrupt_pages == 1
    assert key(1) not in again
    assert not path.exists()


def test_a_file_under_the_name_of_another_page_is_missing(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    store(tier, 1)
    tier.close()
    (tmp_path / f"{key(1).digest.hex()}-0").rename(tmp_path / f"{key(2).digest.hex()}-0")
    again = disk(tmp_path)
    assert again.read(key(2)) is None
    assert again.counts.corrupt_pages == 1


def test_a_deleted_file_is_missing(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    store(tier, 1)
    (tmp_path / f"{key(1).digest.hex()}-0").unlink()
    assert tier.read(key(1)) is None
    assert tier.counts.failures == 1
    assert not len(tier)


def test_a_disk_that_became_read_only_still_returns_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk(tmp_path)
    store(tier, 1)

    def refuse(_path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    check(tier, 1)
    assert not tier.counts.failures


def test_a_full_disk_costs_the_pages_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk(tmp_path)
    store(tier, 1)

    def full(_file: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("tandem.engine.cache.tiers.disk.os.write", full)
        store(tier, 2)
    check(tier, 2, there=False)
    check(tier, 1)
    assert tier.counts.failures == 1
    assert len(list(tmp_path.glob("*-0*"))) == 1
    store(tier, 3)
    check(tier, 3)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr("tandem.engine.cache.tiers.disk.os.write", lambda file, data: write(file, data[:5]))
    tier = disk(tmp_path)
    store(tier, 1)
    check(tier, 1)


def test_a_folder_that_is_gone_fails_and_is_not_created_again(tmp_path: Path) -> None:
    tier = disk(tmp_path / "mounted")
    store(tier, 1)
    (tmp_path / "mounted").rename(tmp_path / "elsewhere")
    store(tier, 2)
    assert tier.read(key(1)) is None
    assert not len(tier)
    assert tier.counts.failures == 2
    assert not (tmp_path / "mounted").exists()


def test_a_folder_that_another_process_uses_is_left_alone(tmp_path: Path) -> None:
    first = disk(tmp_path)
    store(first, 1)
    part = tmp_path / "0011-0.77.part"
    part.write_bytes(b"half a page of the first one")
    with pytest.raises(FailedPrecondition, match=r"another process uses the KV pages in .*--kv-disk-path"):
        disk(tmp_path)
    assert part.exists()
    check(first, 1)
    first.close()
    check(disk(tmp_path), 1)


def test_each_model_layout_and_worker_has_its_own_folder(tmp_path: Path) -> None:
    facts = (("model", "a"), ("dtype", "float32"))
    folders = {
        model_folder(tmp_path, "decode-0", facts, PAGE),
        model_folder(tmp_path, "decode-1", facts, PAGE),
        model_folder(tmp_path, "decode-0", facts, PAGE + 1),
        model_folder(tmp_path, "decode-0", (("model", "b"), ("dtype", "float32")), PAGE),
        model_folder(tmp_path, "decode-0", (("model", "a"), ("dtype", "bfloat16")), PAGE),
    }
    assert len(folders) == 5
    assert model_folder(tmp_path, "decode-0", facts[::-1], PAGE) in folders


def test_settings_that_cannot_be_met_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match=r"kv_host_bytes.*hold no KV page"):
        HostTier(PAGE - 1, PAGE, CPU)
    with pytest.raises(InvalidArgument, match=r"kv_host_bytes.*do not fit into"):
        HostTier(1 << 50, PAGE, CPU)
    with pytest.raises(InvalidArgument, match=r"kv_disk_bytes.*hold no KV page"):
        DiskTier(tmp_path, PAGE, PAGE)
    with pytest.raises(InvalidArgument, match=r"kv_disk_bytes.*exceed the"):
        DiskTier(tmp_path, 1 << 60, PAGE)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InvalidArgument, match=r"kv_disk_path.*cannot be written"):
        DiskTier(tmp_path / "file" / "folder", 1 << 20, PAGE)


def test_a_rate_is_that_of_the_newest_loads() -> None:
    rate = MeasuredRate()
    assert rate.seconds(900, 0.0) == 0.0
    rate.add(0.0, 100, 10.0)
    assert rate.seconds(900, 1.0) == 90.0
    rate.add(50.0, 900, 10.0)
    assert rate.seconds(900, 50.0) == 18.0
    assert rate.seconds(900, 70.0) == 10.0
    assert rate.seconds(900, 200.0) == 0.0, "a tier that was slow once is tried again"


def test_a_tier_that_returned_nothing_takes_infinite_time() -> None:
    rate = MeasuredRate()
    rate.add(0.0, 0, 1.0)
    assert (rate.seconds(1, 1.0), rate.seconds(0, 1.0)) == (float("inf"), 0.0)
    rate.add(1.0, 100, 1.0)
    assert rate.seconds(100, 1.0) == 2.0
