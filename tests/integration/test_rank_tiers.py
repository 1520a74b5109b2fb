"""Tiers of the prefix cache of a real worker of several ranks: each rank's part of a page comes back, or none does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.messages import SamplingParams
from tests.factories import write_tiny_model
from tests.integration.test_worker_pair import ENGINE, Answer, Pair, WorkerEnd, alone

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 96}
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
TOKENS = 16
PROMPTS = [[3 + number, *((7 * number + 5 * position) % 150 + 3 for position in range(140))] for number in range(12)]
"""Prompts of nine pages each, more than fit into the pool."""


@asynccontextmanager
async def workers(model: Path, folder: Path, ranks: dict[str, int], **changes: Any) -> AsyncIterator[Pair]:
    """Run a prefill worker of several ranks with tiers, and a decode worker of one rank."""
    pair = Pair.__new__(Pair)
    pair.answers = {}
    engine = {**ENGINE, "kv_cache_bytes": 1 << 20, **ranks}
    settings = {"kv_disk_bytes": 64 << 20, "kv_disk_path": str(folder), **changes}
    pair.prefill = WorkerEnd("prefill-0", "prefill", model, engine=engine, kv_lease_s=120.0, **settings)
    pair.decode = WorkerEnd("decode-0", "decode", model, kv_lease_s=120.0)
    await asyncio.gather(pair.prefill.start(pair.answers), pair.decode.start(pair.answers))
    try:
        yield pair
    finally:
        for end in (pair.prefill, pair.decode):
            assert (await end.stop())["threads"] == []


async def ask(pair: Pair, name: str, prompt: list[int]) -> Answer:
    answer = await pair.send(name, prompt, SAMPLING)
    async with asyncio.timeout(120):
        await answer.done.wait()
    assert not answer.error
    await pair.prefill.empty()
    return answer


async def ask_all(pair: Pair, model: Path, name: str) -> list[int]:
    """Send all prompts one by one, check the answers, and return how many tokens of each were cached."""
    answers = [await ask(pair, f"{name} {number}", prompt) for number, prompt in enumerate(PROMPTS)]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert [answer.tokens[n] for n in range(4)] == of_one_engine(model, tuple(prompt))
    return [answer.cached_tokens for answer in answers]


@cache
def of_one_engine(model: Path, prompt: tuple[int, ...]) -> list[int]:
    return alone(model, list(prompt), SAMPLING)[0]


async def saved(folder: Path, files: int) -> list[Path]:
    """Wait until the disk has this number of pages, and return their files."""
    async with asyncio.timeout(120):
        while len(found := sorted(folder.glob("*/*/*-0"))) < files:  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)
    return found


@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["two ranks", "two stages"]
)
async def test_pages_of_ranks_come_back_from_tiers_and_after_a_restart(ranks: dict[str, int], tmp_path: Path) -> None:
    model, folder = write_tiny_model(tmp_path / "model", **HEADS), tmp_path / "kv"
    async with workers(model, folder, ranks, kv_host_bytes=2 << 20) as pair:
        assert sum(await ask_all(pair, model, "first")) == 0
        assert sum(await ask_all(pair, model, "again")) == len(PROMPTS) * 8 * TOKENS
        files = await saved(folder, len(PROMPTS) * 8)
    # Each rank's part of a page is damaged in the file of one prompt's last page; the prompt is computed from there.
    page_bytes = files[0].stat().st_size - 28
    for part, number in enumerate((0, page_bytes - 1)):
        damaged = bytearray(files[part].read_bytes())
        damaged[number] ^= 1
        files[part].write_bytes(damaged)
    async with workers(model, folder, ranks) as pair:
        cached = await ask_all(pair, model, "restarted")
        assert len(PROMPTS) * 8 * TOKENS - 2 * 8 * TOKENS <= sum(cached) < len(PROMPTS) * 8 * TOKENS


async def test_files_of_another_number_of_ranks_are_not_read(tmp_path: Path) -> None:
    model, folder = write_tiny_model(tmp_path / "model", **HEADS), tmp_path / "kv"
    async with workers(model, folder, {"tensor_parallel_size": 2}) as pair:
        await ask(pair, "first", PROMPTS[0])
        await saved(folder, 8)
    async with workers(model, folder, {"tensor_parallel_size": 3}) as pair:
        assert (await ask(pair, "again", PROMPTS[0])).cached_tokens == 0
