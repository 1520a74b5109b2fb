"""The multi-token prediction layer of a checkpoint: its logits beside transformers' layers, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.cli.start.preflight import check_draft
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.engine.models.parameters import named_weights
from tandem.engine.speculation.draft_folder import read_head
from tandem.engine.speculation.eagle.mtp import MtpLayer
from tandem.engine.speculation.methods import make_proposer
from tandem.engine.speculation.proposer import DraftSource, ProposerName
from tandem.engine.weights.checkpoint import read_entries
from tandem.protocol.errors import InvalidArgument, ModelError
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.settings.cluster import ClusterSettings
from tests.factories import tiny_engine_config, write_tiny_model
from tests.mtp_models import LAYOUTS, MtpReference, write_mtp
from tests.unit.engine.weights.quantized_folders import quantize_folder

from .head_steps import HeadSteps, target_states

TOLERANCE = 2e-5
TOKENS = [(7 * n + n * n) % 150 + 3 for n in range(14)]


@pytest.mark.parametrize("kernels", [None, ReferenceKernels], ids=["device", "reference"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_logits_are_those_of_transformers_layers(kind: str, kernels: type[Kernels] | None, tmp_path: Path) -> None:
    folder = write_mtp(tmp_path, kind)
    config = tiny_engine_config(folder, mtp=True, kv_cache_bytes=8 << 20)
    runner = ModelRunner.load(config, kernels=kernels and kernels())
    head, reference = HeadSteps(runner), MtpReference(tmp_path, kind)
    assert head.proposer.source == DraftSource(ProposerName.MTP)
    states = head.from_target(target_states(runner, TOKENS))
    wanted_states = reference.target_states(TOKENS)
    torch.testing.assert_close(states, wanted_states, atol=TOLERANCE, rtol=TOLERANCE)
    # At each position, the token comes with the state that it was sampled from.
    tokens, given = TOKENS[1:], wanted_states[:-1]
    for _ in range(3):
        wanted, own = reference(tokens, given)
        actual = head.logits(tokens, given)
        torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        tokens, given = [*tokens, int(wanted[-1].argmax())], torch.cat((given, own[-1:]))


@pytest.mark.parametrize("kind", ["deepseek_v3", "mimo"])
@pytest.mark.parametrize("case", ["deepseek fp8", "W4A16", "W8A16"])
def test_a_quantized_layer_has_the_weights_of_its_dequantized_twin(case: str, kind: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "q_lora_rank": 64, "v_head_dim": 32} if kind == "deepseek_v3" else {}
    twin = write_mtp(tmp_path, kind, **sizes)
    folder = quantize_folder(twin, tmp_path / "quantized", case)
    layers = [MtpLayer.of(load_spec(path), path) for path in (folder, twin)]
    quantized, plain = (dict(named_weights(layer.load(torch.float32, torch.device("cpu")))) for layer in layers)
    assert quantized.keys() == plain.keys()
    for path, weight in quantized.items():
        actual = weight.dequantized(torch.float32) if isinstance(weight, PackedWeight) else weight
        torch.testing.assert_close(actual, plain[path], atol=1e-7, rtol=1e-6)
    packed = {path for path, weight in quantized.items() if isinstance(weight, PackedWeight)}
    assert packed >= {"decoder.layers.0.attention.output", "decoder.layers.0.feed_forward.gate_up"}
    sizes_of = [layer.memory_bytes(torch.float32, on_cpu=False) for layer in layers]
    assert sizes_of[0] < sizes_of[1]
    config = tiny_engine_config(folder, mtp=True, kv_cache_bytes=8 << 20)
    states = torch.randn(len(TOKENS), 64, generator=torch.Generator().manual_seed(1))
    assert HeadSteps(ModelRunner.load(config)).logits(TOKENS, states).isfinite().all()


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (
            "mimo",
            {"without": "input_proj.weight"},
            "has no multi-token prediction layer (tensor model.mtp_layers.0.input_",
        ),
        (
            "deepseek_v3",
            {"without": "3.eh_proj.weight"},
            "(tensor model.layers.3.eh_proj.weight); use a checkpoint that",
        ),
        ("deepseek_v3", {"without": "3.hnorm.weight"}, "lacks tensor model.layers.3.hnorm.weight"),
        ("glm4_moe", {"without": "3.mlp.gate.weight"}, "lacks tensor model.layers.3.mlp.gate.weight"),
        ("qwen3_next", {"without": "mtp.norm.weight"}, "lacks tensor mtp.norm.weight"),
        ("glm4_moe", {"extra": "model.layers.3.self_attn.r_proj.weight"}, "has tensor model.layers.3.self_attn.r_proj"),
    ],
)
def test_a_checkpoint_without_a_complete_layer_is_refused(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = write_mtp(tmp_path, kind, **changes)
    ModelRunner.load(tiny_engine_config(folder, kv_cache_bytes=8 << 20))
    with pytest.raises(ModelError) as refused:
        ModelRunner.load(tiny_engine_config(folder, mtp=True))
    assert said in refused.value.message
    with pytest.raises(ModelError) as refused:
        check_draft(ClusterSettings.of(model=folder, speculate="mtp"))
    assert said in refused.value.message


def test_a_family_without_the_layer_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    with pytest.raises(ModelError, match="LlamaForCausalLM has no multi-token prediction layer that is supported"):
        check_draft(ClusterSettings.of(model=folder, speculate="mtp"))


def test_an_engine_that_has_not_loaded_the_layer_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="has not loaded the multi-token prediction layer"):
        make_proposer(SpeculationMethod.MTP, asynchronous=False)


def test_random_weights_include_the_layer(tmp_path: Path) -> None:
    folder = write_mtp(tmp_path, "glm4_moe")
    (folder / "model.safetensors").unlink()
    config = tiny_engine_config(folder, mtp=True, random_weights=True, dtype="float32", kv_cache_bytes=8 << 20)
    heads = [HeadSteps(ModelRunner.load(config)) for _ in range(2)]
    states = torch.randn(len(TOKENS), 64, generator=torch.Generator().manual_seed(1))
    logits = [head.logits(TOKENS, states) for head in heads]
    assert logits[0].std(0).min() > 0
    assert logits[0].isfinite().all()


def test_kv_of_as_many_tokens_as_the_model_is_held(tmp_path: Path) -> None:
    config = tiny_engine_config(write_mtp(tmp_path, "deepseek_v3"), mtp=True)
    runner = ModelRunner.load(config)
    proposer = HeadSteps(runner).proposer
    assert abs(proposer._head.pool.total - runner.pool.total) <= 1
    assert proposer.memory["kv"] + runner.cache.storage.nbytes <= config.kv_cache_bytes
    layer = read_head(config, runner.spec)
    assert layer is not None
    weights = layer.memory_bytes(torch.float32, on_cpu=True)
    entries = read_entries(config.served.model)
    stored = sum(
        torch.Size(entry.shape).numel() * 4
        for name, entry in entries.items()
        if name.startswith("model.layers.3.") and "embed_tokens" not in name and "head.head" not in name
    )
    assert weights == stored
    # One state of the model, and two of the layer, for each row.
    assert proposer.memory["weights"] == weights + 3 * config.max_step_tokens * 64 * 4
