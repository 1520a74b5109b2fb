"""EAGLE-3 heads: their logits beside an implementation in plain PyTorch, published layouts, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.engine.speculation.draft_folder import DraftKind, check_draft_folder, draft_kind
from tandem.engine.speculation.eagle.folder import read_eagle
from tandem.engine.speculation.proposer import DraftSource, ProposerName
from tandem.protocol.errors import ModelError
from tests.eagle3_reference import Eagle3Reference
from tests.eagle_heads import write_eagle
from tests.factories import tiny_engine_config, write_tiny_model

from .head_steps import HeadSteps, target_states

HIDDEN, VOCAB, LAYERS = 64, 96, 8
FEW = [3, 17, 29, 40, 41, 88, 95]
TOKENS = [(7 * n + n * n) % 90 + 3 for n in range(14)]
TOLERANCE = 2e-5
DEFAULT = (2, 4, 5)

FORMS: dict[str, tuple[dict[str, Any], tuple[int, ...], bool]] = {
    "published": ({"tokens": FEW}, DEFAULT, False),
    "whole vocabulary": ({}, DEFAULT, False),
    "vLLM's layers": ({"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}, (1, 3, 7), False),
    "SGLang's layers": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, DEFAULT, False),
    "norm before residual": ({"norm_before_residual": True, "prefix": "layers.0."}, DEFAULT, True),
}
"""The arguments of `write_eagle`, the layers before which states are taken, and `norm_before_residual`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=LAYERS)


def write_head(folder: Path, **changes: Any) -> Path:
    settings = {"hidden": HIDDEN, "vocabulary": VOCAB, "third": True, "prefix": "midlayer."}
    return write_eagle(folder, **(settings | changes))


@pytest.mark.parametrize("kernels", [None, ReferenceKernels], ids=["device", "reference"])
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_plain_pytorch(
    form: str, kernels: type[Kernels] | None, model: Path, tmp_path: Path
) -> None:
    settings, layers, norm_before_residual = FORMS[form]
    folder = write_head(tmp_path, **settings)
    runner = ModelRunner.load(tiny_engine_config(model, draft=folder), kernels=kernels and kernels())
    head = HeadSteps(runner)
    assert head.proposer.source == DraftSource(ProposerName.EAGLE)
    reference = Eagle3Reference(folder, model, layers, norm_before_residual=norm_before_residual)
    drawn = target_states(runner, TOKENS)
    torch.testing.assert_close(drawn, reference.target_states(TOKENS), atol=TOLERANCE, rtol=TOLERANCE)
    tokens, given = TOKENS[1:], head.from_target(drawn)[:-1]
    torch.testing.assert_close(given, reference.from_target(drawn)[:-1], atol=TOLERANCE, rtol=TOLERANCE)
    for _ in range(3):
        wanted, own = reference(tokens, given)
        torch.testing.assert_close(head.logits(tokens, given), wanted, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(head.drawn_hidden[: len(own)], own, atol=TOLERANCE, rtol=TOLERANCE)
        tokens, given = [*tokens, int(wanted[-1].argmax())], torch.cat((given, own[-1:]))


def test_a_folder_of_speculators_is_read_as_the_published_one(model: Path, tmp_path: Path) -> None:
    folder = write_head(tmp_path, tokens=FEW)
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    size = config.pop("draft_vocab_size")
    outer = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": size}
    published = read_eagle(folder, load_spec(model))
    (folder / "config.json").write_text(json.dumps(outer | {"transformer_layer_config": config}))
    assert draft_kind(folder) is DraftKind.EAGLE
    head = read_eagle(folder, load_spec(model))
    assert (head.spec, head.vocabulary, head.target_layers) == (published.spec, len(FEW), DEFAULT)
    assert (published.norm_before_residual, head.norm_before_residual) == (False, True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"without": "midlayer.hidden_norm.weight"}, "lacks tensor layers.0.hidden_norm.weight, which a head"),
        ({"without": "norm.weight"}, "lacks tensor norm.weight"),
        ({"without": "lm_head.weight", "tokens": FEW}, "lacks tensor lm_head.weight"),
        ({"shapes": {"fc.weight": (64, 128)}}, "fc.weight is [64, 128], config.json calls for [64, 192]"),
        ({"shapes": {"midlayer.self_attn.q_proj.weight": (64, 64)}}, "q_proj.weight is [64, 64]"),
        ({"shapes": {"lm_head.weight": (9, 64)}, "tokens": FEW}, "lm_head.weight is [9, 64], config.json calls"),
        ({"shapes": {"fc.bias": (64,)}}, "has tensor fc.bias, which a head of EAGLE-3"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, "layers [2, 4, 8], which must be different and from 1 to 7"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}, "before layers [2, 4, 4]"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, "5"]}, "eagle_aux_hidden_state_layer_ids is [2, 4, '5']"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 7]}}, "before layers [2, 8]"),
        ({"eagle_config": [1, 3, 4]}, "eagle_config is [1, 3, 4], not an object"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128, the model's is 64"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"], "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
          "kv_lora_rank": 32, "v_head_dim": 16}, "heads of DeepseekV2ForCausalLM are not supported"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(model: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    folder = write_head(tmp_path, **settings)
    assert draft_kind(folder) is DraftKind.EAGLE
    with pytest.raises(ModelError) as refused:
        check_draft_folder(folder, load_spec(model), model)
    assert said in refused.value.message


def test_a_model_of_few_layers_is_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", hidden_size=HIDDEN, vocab_size=VOCAB, num_hidden_layers=4)
    with pytest.raises(ModelError, match=r"before layers \[2, 2, 1\]"):
        check_draft_folder(write_head(tmp_path / "head"), load_spec(model), model)


def test_the_head_counts_in_the_memory(model: Path, tmp_path: Path) -> None:
    folder = write_head(tmp_path, tokens=FEW)
    config = tiny_engine_config(model, draft=folder)
    proposer = HeadSteps(ModelRunner.load(config)).proposer
    entries = read_eagle(folder, load_spec(model)).entries
    weights = sum(torch.Size(entry.shape).numel() * (8 if name == "d2t" else 4) for name, entry in entries.items())
    # Three states of the model, and two of the head, for each row.
    assert proposer.memory["weights"] == weights + (3 + 2) * config.max_step_tokens * HIDDEN * 4
