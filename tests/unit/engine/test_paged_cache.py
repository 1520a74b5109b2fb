"""The cache's memory: there, or refused in a sentence."""

import mmap
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine.cache import paged_cache
from engine.cache.paged_cache import PagedCache
from engine.weights.checkpoint import check_model
from tests.factories import write_tiny_model
from wire.errors import InvalidArgument


def cache_of(folder: Path, capacity_bytes: int) -> PagedCache:
    return PagedCache(check_model(folder), 16, capacity_bytes, torch.float32, torch.device("cpu"))


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
