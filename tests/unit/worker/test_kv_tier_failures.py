"""Disks of a tier that fill up or are unmounted while a worker uses them, and files that another model has left."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.engine.cache.tiers.disk import DiskTier
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.messages import Role
from tandem.worker.config import WorkerConfig
from tandem.worker.kv_tiers import make_tiers
from tests.factories import tiny_engine_config, write_tiny_model
from tests.fake_engine import PAGE_TOKENS
from tests.unit.worker.test_kv_tiers import PAGE_BYTES, ask, evict, saved, tiers_of
from tests.worker_pair import WorkerPair

PROMPT = list(range(11, 11 + 8 * PAGE_TOKENS + 2))
OTHER = [500, *PROMPT]


@pytest.fixture(autouse=True)
def _reload_always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tandem.cost_model.prefix_reload.saved_seconds", lambda _cost, _context, tokens, *_: float(tokens)
    )


@pytest.mark.parametrize("host_pages", [0, 4])
async def test_a_disk_that_fills_up_costs_no_answer_and_is_used_again_once_it_has_room(
    host_pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_bytes, write, written = host_pages * PAGE_BYTES, os.write, 0

    def full_after_three_pages(file: int, data: Any) -> int:
        nonlocal written
        written += len(data)
        if written > 3 * (PAGE_BYTES + 28):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    settings: dict[str, Any] = {"kv_host_bytes": host_bytes, "kv_disk_bytes": 1 << 20, "kv_disk_path": tmp_path}
    async with WorkerPair(both=True, pages=40, **settings) as pair:
        end = pair.decode
        with monkeypatch.context() as full:
            full.setattr("tandem.engine.cache.tiers.disk.os.write", full_after_three_pages)
            await ask(pair, "first", PROMPT)
            await evict(end)
            again = await ask(pair, "again", PROMPT)
            assert again.cached_tokens < 8 * PAGE_TOKENS
            await saved(end)
            disk = tiers_of(end).tiers[-1]
            assert disk.counts.failures > 0
            assert len(disk) <= 3
            assert not list(tmp_path.rglob("*.part"))  # noqa: ASYNC240
        await evict(end)
        await ask(pair, "with room", OTHER)
        await evict(end)
        assert (await ask(pair, "from the disk", OTHER)).cached_tokens == 8 * PAGE_TOKENS
        await pair.empty()


async def test_a_disk_that_is_unmounted_costs_no_answer(tmp_path: Path) -> None:
    async with WorkerPair(both=True, pages=40, kv_disk_bytes=1 << 20, kv_disk_path=tmp_path / "disk") as pair:
        end = pair.decode
        await ask(pair, "first", PROMPT)
        await evict(end)
        (tmp_path / "disk").rename(tmp_path / "elsewhere")
        assert (await ask(pair, "again", PROMPT)).cached_tokens == 0
        await evict(end)
        await ask(pair, "once more", PROMPT)
        disk = tiers_of(end).tiers[0]
        assert disk.counts.failures > 0
        assert disk.counts.loaded_pages == 0
        assert not (tmp_path / "disk").exists(), "the folder of a mount is not created again"
        await pair.empty()


def test_files_of_another_model_dtype_or_page_size_are_in_another_folder(tmp_path: Path) -> None:
    def folder(name: str, **changes: Any) -> Path:
        config = tiny_engine_config(tmp_path / name, **changes)
        engine = ModelRunner.load(config, kernels=ReferenceKernels())
        worker = WorkerConfig("w", Role.BOTH, config, kv_disk_bytes=1 << 20, kv_disk_path=tmp_path / "kv")
        tiers = make_tiers(worker, PrefixCache(engine.pool, engine.kv_pages), engine)
        assert tiers is not None
        (disk,) = tiers.tiers
        assert isinstance(disk, DiskTier)
        return disk._folder

    write_tiny_model(tmp_path / "model")
    write_tiny_model(tmp_path / "other model", seed=7)
    folders = [
        folder("model"),
        folder("other model"),
        folder("model", dtype="bfloat16"),
        folder("model", kv_cache_dtype="int8"),
        folder("model", page_tokens=32),
    ]
    assert len(set(folders)) == len(folders)
    assert folder("model") == folders[0]
    # The same revision with weights that were changed in place.
    weights = next((tmp_path / "model").glob("*.safetensors"))
    os.utime(weights, (1, 1))
    assert folder("model") not in folders
