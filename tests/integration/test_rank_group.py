"""A worker's ranks as processes: they start together, compute together, and end together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed

from tandem.engine.model_runner import ModelRunner
from tandem.protocol.errors import TandemError
from tandem.worker.rank_group import RankGroup
from tests.factories import greedy_answer, tiny_engine_config, write_tiny_model

PROMPT = [(5 * position + 2) % 150 for position in range(40)]


def test_a_group_answers_and_leaves_no_process(tmp_path: Path) -> None:
    config = tiny_engine_config(write_tiny_model(tmp_path, "smollm2"))
    group = RankGroup(config, 3)
    children = [process.pid for process in group._processes]
    try:
        runner = group.load()
        assert greedy_answer(runner, PROMPT, 12) == greedy_answer(ModelRunner.load(config), PROMPT, 12)
        assert group.ended_rank() is None
    finally:
        group.close()
    assert not torch.distributed.is_initialized()
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_a_killed_rank_is_named_and_the_next_step_fails(tmp_path: Path) -> None:
    config = tiny_engine_config(write_tiny_model(tmp_path, "smollm2"))
    group = RankGroup(config, 3)
    try:
        runner = group.load()
        os.kill(group._processes[1].pid or 0, signal.SIGKILL)
        while group.ended_rank() is None:
            time.sleep(0.01)
        assert group.ended_rank() == 2
        with pytest.raises((TandemError, RuntimeError)):
            greedy_answer(runner, PROMPT, 12)
    finally:
        group.close()
    assert group.ended_rank() == 1, "the others end, too"
