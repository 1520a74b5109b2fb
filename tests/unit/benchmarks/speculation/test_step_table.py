"""The table of steps with drafts: every figure of a tiny model, and how drafts are accepted."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.speculation.step_table import Chance, ChanceProposer, StepTable, table_of
from decode_worker.drafts import RowDrafts, StepDrafts
from tandem.engine.model_runner import ModelRunner
from tandem.protocol.speculation_method import SpeculationMethod
from tests.factories import tiny_engine_config
from tests.mtp_models import write_mtp
from tests.soak import soak


@soak  # it fails where a loaded machine ends the answers before the steps that it measures
@pytest.mark.parametrize("method", [SpeculationMethod.NGRAM, SpeculationMethod.MTP])
async def test_every_batch_and_rate_has_its_figures(method: SpeculationMethod, tmp_path: Path) -> None:
    model = write_mtp(tmp_path, "mimo", max_position_embeddings=2048)
    engine = tiny_engine_config(model, kv_cache_bytes=16 << 20, mtp=method is SpeculationMethod.MTP)
    table = StepTable(ModelRunner.load(engine), engine, context=16, steps=4, alphas=[0.5], drafts=[2], method=method)
    rows = await table.rows([1, 3], Console(quiet=True))
    assert [(row["batch"], row["alpha"]) for row in rows] == [(1, 0.5), (3, 0.5)]
    for row in rows:
        fixed: Any = row["fixed"]
        assert set(fixed) == ({"2", "4"} if row["batch"] == 1 else {"1", "2"})
        assert all(1 <= figures["tokens_a_step"] <= 1 + int(drafts) for drafts, figures in fixed.items())
        assert row["best_fixed"] in map(int, fixed)
    assert table_of(rows).row_count == 2


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_each_draft_is_accepted_with_the_given_probability(alpha: float) -> None:
    step = StepDrafts([RowDrafts(row, [1] * 3, 1, 1000 + 3 * row) for row in range(1000)])
    with Chance(alpha).accepting():
        runs = step.runs(range(4000))
    assert runs[5][1] == [5, *range(1015, 1015 + len(runs[5][1]) - 1)]
    mean = sum(len(run) for _, run in runs) / 1000
    assert mean == pytest.approx(1 + alpha + alpha**2 + alpha**3, abs=0.1)
    assert [len(run) for _, run in step.runs([0] * 4000)] == [1] * 1000, "judged by the product's rule again"


def test_all_drafts_are_alike() -> None:
    proposer = ChanceProposer()
    proposer.begin("a", [1, 2])
    assert list(proposer.propose("a", 3).token_ids) == [1, 2, 3]
