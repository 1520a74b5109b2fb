"""Speculation on state layers on the GPU: draft tokens are verified and accepted by CUDA graphs, and without them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch
from tests.factories import write_tiny_model
from tests.kernels.states.test_state_models import check_drafts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TOLERANCE = 2e-4
HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LATENT = {"hidden_size": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "nemotron_h", "olmo_hybrid", "lfm2", "kimi_linear"])
def test_logits_after_accepted_and_rejected_draft_tokens(family: str, graphs: bool, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family, **(LATENT if family == "kimi_linear" else HEADS))
    sizes = {"dtype": "float32", "kv_cache_bytes": 1 << 26, "page_tokens": 16}
    ours = ModelRunner.load(EngineConfig.of(folder, device="cuda", draft_graphs=graphs, max_batch_requests=8, **sizes))
    plain = ModelRunner.load(EngineConfig.of(folder, threads=4, **sizes), kernels=ReferenceKernels())

    def verify(batch: StepBatch) -> Sequence[int | None]:
        hits = ours.graph_use.hits
        tokens = ours.run(batch).token_ids
        assert ours.graph_use.hits - hits == int(graphs)
        return tokens

    check_drafts(ours, plain, verify, TOLERANCE)
