"""The cache's memory: allocated, or refused with one sentence."""

import mmap
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tandem.engine.cache import paged_cache
from tandem.engine.cache.paged_cache import PagedCache, cache_bytes
from tandem.engine.weights.checkpoint import check_model
from tandem.protocol.errors import InvalidArgument
from tests.factories import write_tiny_model


def cache_of(folder: Path, capacity_bytes: int) -> PagedCache:
    return PagedCache(check_model(folder), 16, capacity_bytes, torch.float32, torch.device("cpu"))


def test_the_spare_page_is_within_the_budget(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    one, seven = (cache_bytes(check_model(folder), pages, 16, torch.float32) for pages in (1, 7))
    cache = cache_of(folder, seven)
    assert (cache.pages, cache.tensor.nbytes, cache.page_bytes) == (7, seven, seven // 8)
    assert (cache_of(folder, seven - 1).pages, cache_of(folder, one).pages) == (6, 1)
    with pytest.raises(InvalidArgument, match=rf"{one - 1} bytes hold no page; one needs {one} bytes"):
        cache_of(folder, one - 1)


def test_more_than_the_memory_is_refused_before_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(paged_cache, "_host_zeros", lambda *_: pytest.fail("it was asked for"))
    too_much = 2 * psutil.virtual_memory().total
    with pytest.raises(InvalidArgument, match=r"kv_cache_bytes: .* GiB that are free on cpu; choose a smaller"):
        cache_of(folder, too_much)


def test_a_system_that_refuses_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    folder = write_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(InvalidArgument, match=r"kv_cache_bytes: .* choose a smaller"):
        cache_of(folder, 1 << 22)
