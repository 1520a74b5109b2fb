"""Medusa heads: the folders that are refused, what heads guess, and the hidden states that they guess from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.engine.kernels.reference import rms_norm
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import weight_bytes
from tandem.engine.models.load_spec import load_spec
from tandem.engine.speculation.draft_folder import check_draft_folder, draft_bytes
from tandem.engine.speculation.heads.proposer import HeadsProposer
from tandem.engine.speculation.proposer import DraftSource, ProposerName, WantedDraft
from tandem.engine.steps.batch import StepBatch
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.errors import InvalidArgument, ModelError
from tandem.protocol.messages import SamplingParams
from tests.factories import row, tiny_engine_config, write_tiny_model
from tests.medusa_heads import write_heads

HIDDEN, VOCAB = 64, 96
TOKENS = [5, 17, 2, 40, 90, 33]
MAP = [3, 9, 27, 80, 95]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=HIDDEN, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hidden": 32}, "[32, 32], not [64, 64]"),
        ({"vocabulary": 95}, "1.weight is [95, 64], not [96, 64]"),
        ({"hidden_size": 32}, "hidden_size is 32, the model's is 64"),
        ({"vocab_size": 95}, "vocab_size is 95, the model's is 96"),
        ({"without": "1.0.linear.bias"}, "no tensor 1.0.linear.bias"),
        ({"without": "1.1.weight"}, "no tensor 1.1.weight"),
        ({"medusa_num_heads": 3}, "no tensor 2.0.linear.weight"),
        ({"medusa_num_heads": 0}, "medusa_num_heads is 0"),
        ({"medusa_num_layers": "1"}, "medusa_num_layers is '1'"),
        ({"truncated_vocab_size": 5}, "token_map is missing"),
        ({"token_map": MAP, "truncated_vocab_size": 4}, "token_map is I64 [5], not I64 [4]"),
    ],
)
def test_heads_that_do_not_fit_are_refused(model: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    folder = write_heads(tmp_path, **({"hidden": HIDDEN, "vocabulary": VOCAB} | settings))
    with pytest.raises(ModelError) as refused:
        check_draft_folder(folder, load_spec(model), model)
    assert said in refused.value.message


def test_heads_of_models_with_layer_norm_are_refused(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "cohere2")
    folder = write_heads(tmp_path / "heads", hidden=64, vocabulary=160)
    with pytest.raises(ModelError, match="Cohere2ForCausalLM has LayerNorm, for which there are no heads"):
        check_draft_folder(folder, load_spec(model), model)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "has no config.json"),
        ({}, "describes no known weights"),
        ({"architectures": ["EagleModel"]}, "describes ['EagleModel']"),
        ({"medusa_num_heads": 2}, "has neither medusa_lm_head.safetensors"),
    ],
)
def test_folders_without_heads_are_refused(model: Path, tmp_path: Path, config: Any, said: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as refused:
        check_draft_folder(tmp_path, load_spec(model), model)
    assert said in refused.value.message


def test_pickled_heads_are_refused_with_a_way_out(model: Path, tmp_path: Path) -> None:
    folder = write_heads(tmp_path, HIDDEN, VOCAB)
    (folder / "medusa_lm_head.safetensors").rename(folder / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="save_file"):
        check_draft_folder(folder, load_spec(model), model)


def test_a_token_outside_of_the_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    folder = write_heads(tmp_path, HIDDEN, VOCAB, token_map=[1, VOCAB])
    with pytest.raises(ModelError, match="outside of the vocabulary"):
        ModelRunner.load(tiny_engine_config(model, draft=folder))


FORMS: dict[str, dict[str, Any]] = {
    "published": {},
    "two layers": {"layers": 2, "heads": 3},
    "few tokens": {"token_map": MAP},
    "few of the model's rows": {"token_map": MAP, "own": False},
    "the model's projection": {"own": False},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_drafts_are_the_guesses_of_the_heads(model: Path, tmp_path: Path, form: dict[str, Any]) -> None:
    folder = write_heads(tmp_path, HIDDEN, VOCAB, **form)
    runner = ModelRunner.load(tiny_engine_config(model, draft=folder))
    batch = StepBatch([row(TOKENS[:count], 0, [page]) for page, count in enumerate((6, 3, 5))])
    logits = runner.logits(batch).clone()
    assert runner.draft_proposer is not None
    proposer = runner.draft_proposer()
    assert isinstance(proposer, HeadsProposer)
    weights, read = load_file(model / "model.safetensors"), Heads(folder, form)
    norm, lm_head = weights["model.norm.weight"], weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    hidden = rms_norm(proposer._drawn_hidden[:3], norm, runner.spec.norm_eps)
    torch.testing.assert_close(hidden @ lm_head.T, logits, msg="these are the states that the tokens were drawn from")
    all_heads = form.get("heads", 2)
    draws = [SamplingInput(SamplingParams(1), 0)] * all_heads
    later = WantedDraft("c", draws[:1])
    drafts = proposer.compute([WantedDraft("a", draws, (1, 2)), WantedDraft("b", draws[:1], (0,)), later])
    guesses = [[read.guess(head, hidden[row], lm_head) for head in range(all_heads)] for row in (2, 0)]
    assert [list(draft) for draft in drafts] == [guesses[0], guesses[1][:1], []]
    assert proposer.compute([later]) == [()]
    assert (proposer.longest, proposer.source) == (all_heads, DraftSource(ProposerName.MEDUSA))
    assert proposer.cost.rows_seconds(1, 0) > 0


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_memory_counts_before_it_is_taken(
    model: Path, tmp_path: Path, form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_engine_config(model, draft=write_heads(tmp_path, HIDDEN, VOCAB, **form))
    spec, cpu = load_spec(model), torch.device("cpu")
    assert config.draft is not None
    read = load_file(config.draft / "medusa_lm_head.safetensors").values()
    copied = len(MAP) * HIDDEN * 4 if form == FORMS["few of the model's rows"] else 0
    counted = draft_bytes(config, spec, torch.float32, cpu)
    assert counted == sum(tensor.nbytes for tensor in read) + copied + config.max_step_tokens * HIDDEN * 4
    free = [weight_bytes(spec, torch.float32) + counted]
    monkeypatch.setattr("tandem.engine.memory.free_bytes", lambda _: free[0])
    proposer = ModelRunner.load(config).draft_proposer
    assert proposer is not None
    assert proposer().memory == {"weights": counted}
    free[0] -= 1
    with pytest.raises(InvalidArgument, match="device: the weights take"):
        ModelRunner.load(config)


def test_tokens_are_the_same_with_heads(model: Path, tmp_path: Path) -> None:
    configs = tiny_engine_config(model), tiny_engine_config(model, draft=write_heads(tmp_path, HIDDEN, VOCAB))
    batch = StepBatch([row(TOKENS[:count], 0, [page]) for page, count in enumerate((6, 3, 5))])
    plain, heads = (ModelRunner.load(config) for config in configs)
    assert torch.equal(plain.logits(batch), heads.logits(batch))
    assert plain.draft_proposer is None


class Heads:
    """The heads of a folder, read and computed as the published code does."""

    def __init__(self, folder: Path, form: dict[str, Any]) -> None:
        self._tensors = load_file(folder / "medusa_lm_head.safetensors")
        self._layers = form.get("layers", 1)
        self._token_map = form.get("token_map")

    def guess(self, head: int, x: Tensor, lm_head: Tensor) -> int:
        for layer in range(self._layers):
            name = f"{head}.{layer}.linear"
            x = x + torch.nn.functional.silu(self._tensors[f"{name}.weight"] @ x + self._tensors[f"{name}.bias"])
        shared = lm_head if self._token_map is None else lm_head[self._token_map]
        best = int((self._tensors.get(f"{head}.{self._layers}.weight", shared) @ x).argmax())
        return best if self._token_map is None else self._token_map[best]
