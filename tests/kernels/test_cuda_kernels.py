"""All GPU kernels together, in whole models: the logits of the plain ones. In Triton's interpreter, or on a GPU."""

import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.linear.gated_product import GatedProduct, PlainGated
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.engine.speculation.eagle.proposer import EagleProposer
from tandem.engine.speculation.proposer import WantedDraft
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams
from tests.eagle_heads import write_eagle
from tests.factories import write_tiny_model
from tests.mtp_models import LAYOUTS, write_mtp
from tests.soak import soak

DRAW = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 1, "num_hidden_layers": 2},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "head_dim": 64, "num_key_value_heads": 2},
    "qwen2_moe": {
        "model_type": "qwen2_moe", "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 64, "num_key_value_heads": 2, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "gemma4": {
        "model_type": "gemma4_text", "num_key_value_heads": 2, "global_head_dim": 64, "hidden_size_per_layer_input": 0,
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 48,
    },
    "nemotron_h": {
        "model_type": "nemotron_h", "hybrid_override_pattern": "*E", "num_key_value_heads": 2, "head_dim": 64,
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "moe_latent_size": 64,
        "moe_shared_expert_intermediate_size": 96,
    },
}  # fmt: skip
"""One layer each, but one model has two: it shows that a layer reads what the one before it has written.

`make soak` has qwen3, too: its norms of heads are those of qwen3_moe.
"""


@pytest.fixture(params=[pytest.param(name, marks=soak) if name == "qwen3" else name for name in MODELS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = {
        "vocab_size": 67, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "eos_token_id": 0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | MODELS[request.param]))
    return tmp_path


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["auto", "int8"])
def test_logits_of_the_plain_kernels(folder: Path, kv_dtype: torch.dtype | None) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = EngineConfig.of(
        folder, device=device, dtype="float32", page_tokens=16, kv_cache_bytes=1 << 20, random_weights=True,
        kv_cache_dtype="int8" if kv_dtype else "auto",
    )  # fmt: skip
    kernels = CudaKernels(load_spec(folder), torch.device(device), torch.float32, 16, 4, kv_dtype)
    ours, plain = (ModelRunner.load(config, kernels=backend) for backend in (kernels, ReferenceKernels()))
    # A key that is rounded otherwise may get the next code.
    tolerance = 2e-3 if kv_dtype else 2e-5
    prompt = [(7 * i) % 67 for i in range(21)]
    steps = [
        [StepRow(prompt, 0, [3, 1, 2], DRAW), StepRow(prompt[:5], 0, [5], DRAW)],
        [StepRow([9], 21, [3, 1, 2], DRAW), StepRow([8], 5, [5], DRAW), StepRow(prompt[:17], 0, [6, 7], DRAW)],
        [StepRow([4], 22, [3, 1, 2], DRAW), StepRow([2], 17, [6, 7], DRAW)],
    ]
    for rows in steps:
        step = StepBatch(rows)
        torch.testing.assert_close(ours.logits(step), plain.logits(step), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["EAGLE-1", "EAGLE-3", "glm4_moe", "deepseek_v3"])
def test_a_head_guesses_as_with_the_plain_kernels(kind: str, tmp_path: Path) -> None:
    shape: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    few = [1, 5, 9, 20, 33, 40, 66]
    if kind in LAYOUTS:
        if kind == "deepseek_v3":
            shape = {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
        model = write_mtp(tmp_path, kind, hidden_size=128, vocab_size=67, **shape)
        drafting: dict[str, Any] = {"mtp": True}
    elif kind == "EAGLE-3":
        model = write_tiny_model(tmp_path / "model", hidden_size=128, num_hidden_layers=3, vocab_size=67, **shape)
        layers = {"shapes": {"fc.weight": (128, 256)}, "eagle_aux_hidden_state_layer_ids": [1, 2]}
        drafting = {"draft": write_eagle(tmp_path / "head", 128, 67, third=True, tokens=few, **layers, **shape)}
    else:
        model = write_tiny_model(tmp_path / "model", hidden_size=128, num_hidden_layers=1, vocab_size=67, **shape)
        drafting = {"draft": write_eagle(tmp_path / "head", 128, 67, tokens=few, **shape)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = EngineConfig.of(model, device=device, dtype="float32", page_tokens=16, kv_cache_bytes=1 << 20, **drafting)
    kernels = CudaKernels(load_spec(model), torch.device(device), torch.float32, 16, 4)
    ours, plain = (drafts(ModelRunner.load(config, kernels=backend)) for backend in (kernels, ReferenceKernels()))
    assert ours == plain


def drafts(runner: ModelRunner) -> list[list[int]]:
    """Returns what a head proposes behind two prompts, and then behind a step in which one draft was accepted."""
    assert runner.draft_proposer is not None
    proposer = runner.draft_proposer()
    assert isinstance(proposer, EagleProposer)
    first = runner.run(StepBatch([StepRow([3, 4, 5], 0, [0], DRAW), StepRow([7, 8], 0, [1], DRAW)])).token_ids
    for name, token in zip("ab", first, strict=True):
        assert token is not None
        proposer.begin(name, [token])
        assert proposer.capacity(name, 3) == 3
    token_ids = [*proposer.compute([WantedDraft(name, [DRAW] * 3, [row]) for row, name in enumerate("ab")])]
    rows = [
        StepRow([token_ids[0][0]], 3, [0], DRAW),
        StepRow([11], 4, [0], DRAW),
        StepRow([token_ids[1][0]], 2, [1], DRAW),
    ]
    _, second, third = runner.run(StepBatch(rows)).token_ids
    assert second is not None
    assert third is not None
    proposer.extend("a", [11, second])
    proposer.extend("b", [third])
    assert [proposer.capacity(name, 3) for name in "ab"] == [3, 3]
    token_ids += proposer.compute([WantedDraft("a", [DRAW] * 3, [0, 1]), WantedDraft("b", [DRAW] * 2, [2])])
    return [list(draft) for draft in token_ids]


class _Slow(Future[GatedProduct]):
    """A choice that is made at the first call of `result`."""

    def result(self, timeout: float | None = None) -> GatedProduct:
        if not self.done():
            self.set_result(PlainGated(pdl=False))
        return super().result(timeout)


def test_no_library_is_still_compiling_when_graphs_are_to_be_captured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = CudaKernels(load_spec(folder), device, torch.float32, 16, max_decode_rows=4)
    compiling = _Slow()
    monkeypatch.setattr(kernels, "_gated_soon", compiling)
    assert not kernels.prompts_capturable
    assert compiling.done()
