"""Bytes that arrive are the bytes that were sent, or the request is prefilled again."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tandem.protocol.messages import RequestRef, SamplingParams
from tests.fake_engine import PAGE_TOKENS, answer_to
from tests.worker_pair import ROUTER, RequestOutput, WorkerPair, until

PROMPT = list(range(11, 11 + 2 * PAGE_TOKENS + 3))
PAGES = 3
TEN = SamplingParams(max_tokens=10)
Memory = np.ndarray[Any, np.dtype[np.int32]]


def flip_first_bit(memory: Memory, pages: Sequence[int]) -> None:
    memory[pages[0], 0, 0] ^= 1


def flip_last_filled_word(memory: Memory, pages: Sequence[int]) -> None:
    memory[pages[2], 2, 1] ^= 1 << 30


def swap_pages(memory: Memory, pages: Sequence[int]) -> None:
    memory[[pages[0], pages[1]]] = memory[[pages[1], pages[0]]]


def swap_words(memory: Memory, pages: Sequence[int]) -> None:
    memory[pages[1], [0, 1], 0] = memory[pages[1], [1, 0], 0]


def lose_a_page(memory: Memory, pages: Sequence[int]) -> None:
    memory[pages[1]] = 0


@pytest.mark.parametrize("damage", [flip_first_bit, flip_last_filled_word, swap_pages, swap_words, lose_a_page])
async def test_damaged_pages_are_never_decoded(
    damage: Callable[[Memory, Sequence[int]], None], caplog: pytest.LogCaptureFixture
) -> None:
    async with WorkerPair() as pair:
        pair.fabric.damage_next(lambda pages: damage(pair.decode.engine.memory, pages))
        with caplog.at_level(logging.ERROR):
            failed = pair.send("q", PROMPT, TEN)
            await until(lambda: failed.finish)
        assert failed.error == "TRANSFER_FAILED"
        assert len(failed.tokens) == 1  # the prefill worker's own
        assert not pair.decode.engine.batches
        assert "KV of request q, attempt 1, from prefill-0 (incarnation 1) is not what was sent" in caplog.text
        await pair.empty()

        again = pair.send("q", PROMPT, TEN, attempt=2)
        await until(lambda: again.finish)
        assert again.tokens == answer_to(PROMPT, TEN)
        state = pair.decode.worker.report.inspect()
        assert (state.checksum_failures, state.checksums_equal, state.fenced) == (1, PAGES, 1)
        await pair.empty()


async def test_damage_after_the_prompt_has_no_effect() -> None:
    async with WorkerPair() as pair:

        def litter(pages: Sequence[int]) -> None:
            pair.decode.engine.memory[pages[2], 3] = -1

        pair.fabric.damage_next(litter)
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, TEN)
        assert pair.decode.worker.report.inspect().checksums_equal == PAGES
        await pair.empty()


async def test_pages_of_early_chunks_are_summed_too() -> None:
    async with WorkerPair(max_step_tokens=PAGE_TOKENS) as pair:
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, TEN)
        assert pair.decode.worker.report.inspect().checksums_equal == PAGES


@pytest.mark.parametrize(("rate", "checked"), [(0.0, 0), (0.01, 1), (0.5, 2)])
async def test_the_rate_is_a_setting(rate: float, checked: int) -> None:
    async with WorkerPair(kv_checksum_rate=rate) as pair:
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, TEN)
        assert pair.decode.worker.report.inspect().checksums_equal == checked


async def test_workers_with_different_rates_refuse_each_other_in_words() -> None:
    async with WorkerPair() as pair:
        mine = pair.decode.worker.peers._mine
        other = tuple((name, value.replace("of 1", "of 0.5")) for name, value in mine.compatibility_facts)
        pair.decode.worker.peers._mine = replace(mine, compatibility_facts=other, compatibility_hash="0" * 64)
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.error == "FAILED_PRECONDITION"
        assert "kv_checksums is" in output.message
        assert "of 0.5 of the pages" in output.message


async def test_kv_that_was_computed_in_place_needs_no_check() -> None:
    async with WorkerPair(both=True) as pair:
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, TEN)
        assert pair.decode.worker.report.inspect().checksums_equal == 0
        await pair.empty()


class SlowSums:
    """Sums of an engine that wait until the test lets them go."""

    def __init__(self, pair: WorkerPair) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        self._sums = pair.decode.engine.page_sums
        pair.decode.worker._checks._sums = self

    def __call__(self, pages: Sequence[int], filled: Sequence[int], groups: Sequence[int]) -> Sequence[int]:
        self.asked.set()
        assert self.go.wait(60)
        return self._sums(pages, filled, groups)


async def test_a_checksum_check_does_not_delay_other_requests() -> None:
    async with WorkerPair() as pair:
        steps = 6
        pair.decode.engine.hold(after=steps)
        running = pair.send("r", [7, 8, 9], SamplingParams(max_tokens=200))
        await until(pair.decode.engine.waiting.is_set)
        slow = SlowSums(pair)
        output = pair.send("q", PROMPT, TEN)
        await until(slow.asked.is_set)
        pair.decode.engine.resume()
        await until(lambda: len(running.tokens) > 1 + steps + 5)
        pair.fabric.wait_until_idle()
        assert output.finish is None
        assert pair.decode.worker.admission.heartbeat([]) == ()
        slow.go.set()
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, TEN)


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_client_that_leaves_during_the_check(damaged: bool) -> None:
    async with WorkerPair() as pair:
        slow = SlowSums(pair)
        if damaged:
            pair.fabric.damage_next(lambda pages: flip_first_bit(pair.decode.engine.memory, pages))
        pair.send("q", PROMPT, TEN)
        await until(slow.asked.is_set)
        pair.abort("q")
        assert pair.decode.engine.pool.counts().free < 64
        slow.go.set()
        await pair.empty()
        assert not pair.decode.engine.batches


async def test_a_heartbeat_during_the_check_is_no_loss() -> None:
    async with WorkerPair() as pair:
        slow = SlowSums(pair)
        output = pair.outputs["q"] = RequestOutput()
        lease = pair.reserve("q", PROMPT, TEN)
        pair.prefill.worker.prefill(pair.task("q", PROMPT, TEN, lease))
        await until(slow.asked.is_set)
        assert pair.decode.worker.admission.heartbeat([lease]) == ()
        slow.go.set()
        await until(lambda: output.finish)
        assert output.tokens == answer_to(PROMPT, TEN)


async def test_pages_that_cannot_be_summed_fail_closed() -> None:
    async with WorkerPair() as pair:

        def broken(pages: Sequence[int], filled: Sequence[int], groups: Sequence[int]) -> Sequence[int]:
            raise RuntimeError("the device is gone")

        pair.decode.worker._checks._sums = broken
        output = pair.send("q", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.error == "TRANSFER_FAILED"
        pair.decode.worker._checks._sums = pair.decode.engine.page_sums
        pair.prefill.worker._checks._sums = broken
        output = pair.send("r", PROMPT, TEN)
        await until(lambda: output.finish)
        assert output.error == "TRANSFER_FAILED"
        pair.decode.worker.abort(ROUTER, [RequestRef("r", 1)])
        await pair.empty()
