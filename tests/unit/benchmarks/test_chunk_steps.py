"""Steps with a chunk of a prompt beside answers, on a tiny engine; no timing."""

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.engine.chunk_steps import chunk_rows
from benchmarks.engine.gpu_engine import GpuEngine
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch
from tests.factories import write_tiny_model


def test_each_step_decodes_all_rows_and_computes_the_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    folder = write_tiny_model(tmp_path / "tiny", "smollm2")
    engine = GpuEngine(ModelRunner.load(EngineConfig.of(folder, threads=1, kv_cache_bytes=1 << 20)))
    steps: list[StepBatch] = []
    launch = engine.runner.launch
    monkeypatch.setattr(engine.runner, "launch", lambda batch: (steps.append(batch), launch(batch))[1])
    options = argparse.Namespace(rows=3, context=64, chunks=[0, 16], steps=4)
    rows = chunk_rows(engine, options)
    assert [row["chunk"] for row in rows] == [0, 16]
    assert rows[0]["prompt_tokens_per_s"] == 0
    for row in rows:
        assert row["answer_tokens_per_s"] == pytest.approx(3 / row["itl_ms"] * 1e3, rel=0.01)
    with_prompt = [step for step in steps if len(step.chunks)]
    assert len(with_prompt) == len(steps) // 2 == 12
    for step in with_prompt:
        assert [len(row.token_ids) for row in step.rows] == [1, 1, 1, 16]
        pages = [set(row.page_ids) for row in step.rows]
        assert len(set.union(*pages)) == sum(map(len, pages)), "no row shares a page"
