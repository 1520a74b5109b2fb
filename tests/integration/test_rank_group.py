"""A worker's ranks as processes: they start together, compute together, and end together."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed

from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.logging.logs import LogConfig, LogFormat
from tandem.protocol.errors import TandemError, Unavailable
from tandem.protocol.messages import PeerRef
from tandem.settings.parsing import NamedPath
from tandem.worker.follower_process import FollowerProcess
from tandem.worker.rank_group import RankGroup
from tandem.worker.transfer import RankTransfer
from tests.adapters import TinyAdapter, load_at_runtime
from tests.factories import greedy_answer, tiny_engine_config, write_tiny_model

PROMPT = [(5 * position + 2) % 150 for position in range(40)]


def test_a_group_answers_and_leaves_no_process(tmp_path: Path) -> None:
    """With an adapter of the start, one that is loaded later, and a draft model on the first rank."""
    model = write_tiny_model(tmp_path / "model", "smollm2")
    paths = [TinyAdapter("smollm2", seed).write(tmp_path / f"adapter {seed}") for seed in (1, 2)]
    settings: dict[str, Any] = {"loras": (NamedPath("first", paths[0]),), "runtime_loras": True, "max_loras": 2}
    config = tiny_engine_config(model, kv_cache_bytes=4 << 20, draft=model, **settings)
    group = RankGroup(config, 3)
    children = [follower.pid for follower in group._followers]
    try:
        runner = group.load()
        alone = ModelRunner.load(config)
        assert [load_at_runtime(loaded, paths[1]) for loaded in (runner, alone)] == [2, 2]
        answers, wanted = (
            [greedy_answer(loaded, PROMPT, 12, adapter) for adapter in range(3)] for loaded in (runner, alone)
        )
        assert answers == wanted
        assert len({tuple(answer) for answer in wanted}) == 3
        assert runner.draft_proposer is not None
        assert group.ended_rank() is None
        assert runner.device_name == "3 ranks, cpu"
    finally:
        group.close()
    assert not torch.distributed.is_initialized()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_a_group_that_divides_tokens_answers_with_adapters_as_one_rank(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "smollm2")
    paths = [TinyAdapter("smollm2", seed).write(tmp_path / f"adapter {seed}") for seed in (1, 2)]
    settings: dict[str, Any] = {"loras": (NamedPath("first", paths[0]),), "runtime_loras": True, "max_loras": 2}
    config = tiny_engine_config(model, kv_cache_bytes=4 << 20, **settings)
    group = RankGroup(config, 2, divides_tokens=True)
    try:
        runner, alone = group.load(), ModelRunner.load(config)
        assert [load_at_runtime(loaded, paths[1]) for loaded in (runner, alone)] == [2, 2]
        for adapter in range(3):
            assert greedy_answer(runner, PROMPT, 12, adapter) == greedy_answer(alone, PROMPT, 12, adapter)
        assert group.open_transports == []
        assert runner.roofline.token_ranks == 2
        assert runner.cost_guess.token_s == alone.cost_guess.token_s / 2, "what routers predict with from the start"
    finally:
        group.close()


def test_a_hung_rank_that_divides_tokens_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.rank_group.HANG_ON_CPU_S", 1.0)
    group = RankGroup(tiny_engine_config(write_tiny_model(tmp_path, "smollm2")), 3, divides_tokens=True)
    try:
        group.load()
        follower = psutil.Process(group._followers[1].pid)
        follower.suspend()
        while group.silent_rank() is None:
            time.sleep(0.01)
        assert group.silent_rank() == 2
        follower.resume()
        while group.silent_rank() is not None:
            time.sleep(0.01)
    finally:
        group.close()


def test_a_killed_rank_is_named_and_the_next_step_fails(tmp_path: Path) -> None:
    config = tiny_engine_config(write_tiny_model(tmp_path, "smollm2"))
    group = RankGroup(config, 3)
    try:
        runner = group.load()
        os.kill(group._followers[1].pid, signal.SIGKILL)
        while group.ended_rank() is None:
            time.sleep(0.01)
        assert group.ended_rank() == 2
        with pytest.raises((TandemError, RuntimeError)):
            greedy_answer(runner, PROMPT, 12)
    finally:
        group.close()
    assert group.ended_rank() == 1, "the others end, too"


@pytest.mark.parametrize(("error", "raised"), [(OSError("no memory"), Unavailable), (KeyboardInterrupt(), None)])
def test_a_start_that_fails_half_way_leaves_nothing(
    error: BaseException, raised: type[BaseException] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[FollowerProcess] = []

    def start() -> FollowerProcess:
        if started:
            raise error
        started.append(FollowerProcess())
        return started[0]

    monkeypatch.setattr("tandem.worker.rank_group.FollowerProcess", start)
    config, files = tiny_engine_config(tmp_path), set(os.listdir("/proc/self/fd"))
    with pytest.raises(raised or type(error), match="no memory" if raised else None):
        RankGroup(config, 3)
    assert not started[0].is_alive
    assert set(os.listdir("/proc/self/fd")) <= files


def test_an_interrupted_start_is_no_failure_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tandem.worker.rank_group.join", interrupt)
    monkeypatch.setattr("tandem.worker.rank_group.END_TIMEOUT_S", 0.0)
    children = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt):
        RankGroup(tiny_engine_config(tmp_path), 2)
    assert psutil.Process().children() == children


def lead(config: EngineConfig, pids: Connection) -> None:
    """Run as the first rank of two, and send the process ids of the followers."""
    group = RankGroup(config, 2)
    pids.send([follower.pid for follower in group._followers])
    group.load()
    signal.pause()


def test_a_stopped_follower_ends_with_its_killed_leader(tmp_path: Path) -> None:
    config = tiny_engine_config(write_tiny_model(tmp_path, "smollm2"))
    context = multiprocessing.get_context("spawn")
    pids, sent = context.Pipe()
    leader = context.Process(target=lead, args=(config, sent))
    leader.start()
    (pid,) = pids.recv()
    follower = psutil.Process(pid)
    follower.suspend()
    leader.kill()
    leader.join()
    while follower.is_running() and follower.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


def lead_without_model(config: EngineConfig, log_config: LogConfig) -> None:
    """Run as the first rank of two until the other one has ended, because it has no model."""
    group = RankGroup(config, 2, RankTransfer("nixl", PeerRef("decode-0", 7), False), log_config=log_config)
    while group.ended_rank() is None:
        time.sleep(0.01)
    group.close()


def test_the_lines_of_a_follower_have_the_format_and_the_name_of_its_worker(tmp_path: Path) -> None:
    config = tiny_engine_config(tmp_path / "nowhere")
    log = LogConfig(tmp_path / "log", LogFormat.JSON)
    leader = multiprocessing.get_context("spawn").Process(target=lead_without_model, args=(config, log))
    leader.start()
    leader.join()
    assert leader.exitcode == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    ended = next(line for line in lines if line["message"] == "rank 1 has ended")
    assert (ended["process"], ended["incarnation"]) == ("decode-0 rank 1", 7)
    assert "nowhere" in ended["error"]
