"""An EAGLE head: its folder, what it guesses beside an implementation of its own, and the context that it keeps."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import rms_norm

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.rope import RopeConfig
from tandem.engine.draft_training.eagle_layer import EagleLayer, EagleSizes
from tandem.engine.draft_training.train_heads import BaseWeights
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.engine.speculation.draft_folder import DraftKind, check_draft_folder, draft_kind, drafting_model
from tandem.engine.speculation.eagle.proposer import EagleProposer
from tandem.engine.speculation.load_draft import split_kv
from tandem.engine.speculation.proposer import DRAFTS_MAX, DraftSource, ProposerName, WantedDraft
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.errors import ModelError
from tandem.protocol.messages import SamplingParams
from tests.eagle_heads import DIM, HEADS, KV_HEADS, WIDTH, write_eagle
from tests.factories import row, tiny_engine_config, write_tiny_model

HIDDEN, VOCAB = 64, 96
FEW = [3, 17, 29, 40, 41, 88, 95]
GREEDY = SamplingParams(64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=HIDDEN, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hidden": 32}, "hidden_size is 32, the model's is 64"),
        ({"vocabulary": 95}, "vocab_size is 95, the model's is 96"),
        ({"without": "fc.weight", "architectures": ["LlamaForCausalLMEagle"]}, "lacks tensor fc.weight"),
        ({"without": "fc.bias"}, "lacks tensor fc.bias"),
        ({"without": "layers.0.mlp.up_proj.weight"}, "lacks tensor layers.0.mlp.up_proj.weight"),
        ({"shapes": {"fc.weight": (64, 64)}}, "fc.weight is [64, 64], config.json calls for [64, 128]"),
        ({"shapes": {"layers.0.self_attn.q_proj.weight": (32, 64)}}, "q_proj.weight is [32, 64]"),
        ({"shapes": {"layers.0.input_layernorm.weight": (64,)}}, "has tensor layers.0.input_layernorm.weight"),
        ({"num_hidden_layers": 2, "architectures": ["LlamaForCausalLMEagle"]}, "num_hidden_layers is 2"),
        ({"draft_vocab_size": 5}, "the tensor d2t is missing"),
        ({"tokens": FEW, "draft_vocab_size": 5}, "d2t is I64 [7], not I64 [5]"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1}, "Mixtral"),
        ({"hidden_act": "relu"}, "config.json: hidden_act 'relu' is not supported"),
    ],
)
def test_heads_that_do_not_fit_are_refused(model: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    folder = write_eagle(tmp_path, **({"hidden": HIDDEN, "vocabulary": VOCAB} | settings))
    assert draft_kind(folder) is DraftKind.EAGLE
    with pytest.raises(ModelError) as refused:
        check_draft_folder(folder, load_spec(model), model)
    assert said in refused.value.message


def test_a_pickled_head_is_refused_with_a_way_out(model: Path, tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, HIDDEN, VOCAB)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="save_file"):
        check_draft_folder(folder, load_spec(model), model)


def test_a_token_outside_of_the_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, HIDDEN, VOCAB, tokens=[1, VOCAB])
    with pytest.raises(ModelError, match="outside of the vocabulary"):
        ModelRunner.load(tiny_engine_config(model, draft=folder))


def test_a_head_holds_kv_of_as_many_tokens_as_the_model(model: Path, tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, HIDDEN, VOCAB, tokens=FEW)
    config = tiny_engine_config(model, draft=folder, kv_cache_dtype="int8")
    runner = ModelRunner.load(config)
    proposer = runner.draft_proposer and runner.draft_proposer()
    assert isinstance(proposer, EagleProposer)
    kv = split_kv(config, runner.spec, 16, torch.device("cpu"), None, whole=runner.spec)
    assert runner.cache.storage.nbytes <= (kv.target or 0)
    assert proposer.memory["kv"] + runner.cache.storage.nbytes <= 1 << 20
    assert abs(proposer._head.pool.total - runner.pool.total) <= 1
    weights = HIDDEN * (2 * HIDDEN + 2 * HEADS * DIM + 2 * KV_HEADS * DIM + 3 * WIDTH) + 2 * HIDDEN
    rows = len(FEW) * (4 * HIDDEN + 8)
    states = 3 * config.max_step_tokens * HIDDEN * 4
    assert proposer.memory["weights"] == 4 * weights + rows + states
    drafting = drafting_model(folder, runner.spec)
    assert drafting is not None
    assert len(drafting.layers) == 1


def test_a_context_as_long_as_the_head_allows_begins_anew(model: Path, tmp_path: Path) -> None:
    folder = write_eagle(tmp_path, HIDDEN, VOCAB, max_position_embeddings=8)
    runner = ModelRunner.load(tiny_engine_config(model, draft=folder))
    proposer = runner.draft_proposer and runner.draft_proposer()
    assert isinstance(proposer, EagleProposer)
    assert proposer.missing_at_first(40) == DRAFTS_MAX + 1
    proposer.begin("b", list(range(3, 43)))
    assert proposer.missing("b") == DRAFTS_MAX + 1
    proposer.begin("a", [3, 4, 5])
    for token in range(6, 26):
        proposer.extend("a", [token])
        assert proposer.capacity("a", 3) == 3
        (draft,) = proposer.compute([WantedDraft("a", [SamplingInput(GREEDY, 0)] * 3, [0])])
        assert len(draft) == 3
        assert len(proposer._requests["a"].tokens) + 2 <= 8


class Answer:
    """Steps of a model over one request, with the states that it left."""

    def __init__(self, runner: ModelRunner, prompt: Sequence[int], page: int) -> None:
        self.runner, self.tokens, self.states = runner, list(prompt), list[Tensor]()
        self._pages = list(range(page, page + 4))
        self._prompt = len(prompt)

    def rows(self, step: Sequence[int]) -> list[StepRow]:
        """Rows of the newest token, and of drafts behind it."""
        if not self.states:
            return [row(self.tokens, 0, self._pages)]
        start = len(self.tokens) - 1
        return [row([token], start + n, self._pages) for n, token in enumerate([self.tokens[-1], *step])]


FORMS: dict[str, dict[str, Any]] = {"published": {}, "few tokens": {"tokens": FEW}, "no bias": {"bias": False}}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_drafts_are_the_guesses_of_the_head(model: Path, tmp_path: Path, form: dict[str, Any]) -> None:
    """Of two requests, whatever was accepted, the head's context are the states that drew their tokens."""
    folder = write_eagle(tmp_path, HIDDEN, VOCAB, **form)
    runner = ModelRunner.load(tiny_engine_config(model, draft=folder))
    proposer = runner.draft_proposer and runner.draft_proposer()
    assert isinstance(proposer, EagleProposer)
    assert proposer.source == DraftSource(ProposerName.EAGLE)
    layer, norm = layer_of(folder, model, form), load_file(model / "model.safetensors")["model.norm.weight"]
    answers = {name: Answer(runner, range(3, length), page) for name, length, page in (("a", 9, 0), ("b", 14, 8))}
    for name, answer in answers.items():
        drawn = run(runner, answer, ())
        proposer.begin(name, answer.tokens + drawn)
        assert proposer.compute([WantedDraft(name, [SamplingInput(GREEDY, 1)])]) == [()], (
            "the states are another step's"
        )
        answer.tokens += drawn
        answer.states.append(rms_norm(runner.drawn_hidden[0], (HIDDEN,), norm, 1e-5))
    contexts: dict[str, list[tuple[Tensor, int]]] = {name: [] for name in answers}
    dice = random.Random(1)
    for step in range(8):
        taken = {name: dice.sample(range(3, 90), dice.randint(0, 3)) for name in answers}
        rows = {name: answer.rows(taken[name]) for name, answer in answers.items()}
        token_ids = runner.run(StepBatch([row for some in rows.values() for row in some])).token_ids
        states = rms_norm(runner.drawn_hidden, (HIDDEN,), norm, 1e-5).clone()
        wanted, first = [], 0
        for name, answer in answers.items():
            numbers = range(first, first + len(rows[name]))
            first += len(rows[name])
            # As if all were accepted: the tokens are those that the rows had, and the last one's draw.
            gained = [*taken[name], token_ids[numbers[-1]]]
            answer.tokens += gained
            proposer.extend(name, gained)
            if step == 4:
                continue  # a step without drafts, whose states are missing
            contexts[name] += [(states[number], token) for number, token in zip(numbers, gained, strict=True)]
            assert proposer.capacity(name, 3) == 3
            wanted.append(WantedDraft(name, [SamplingInput(GREEDY, 0)] * dice.randint(1, 3), numbers))
        drafted = proposer.compute(wanted)
        assert [list(draft) for draft in drafted] == [
            layer_guesses(layer, contexts[str(request.key)], len(request.draws)) for request in wanted
        ]
    for name in answers:
        proposer.leave(name)
    proposer._head.pool.check_integrity()
    assert proposer._head.pool.counts().free == proposer._head.pool.total


def run(runner: ModelRunner, answer: Answer, drafts: Sequence[int]) -> list[int]:
    return [token for token in runner.run(StepBatch(answer.rows(drafts))).token_ids if token is not None]


def layer_of(folder: Path, model: Path, form: dict[str, Any]) -> EagleLayer:
    """Returns the layer of a folder as it is trained."""
    mine, its = load_file(folder / "model.safetensors"), load_file(model / "model.safetensors")
    base = BaseWeights(its["model.norm.weight"], its["lm_head.weight"], 1e-5, its["model.embed_tokens.weight"])
    shape = AttentionShape(HEADS, KV_HEADS, DIM, DIM**-0.5)
    tokens = form.get("tokens")
    layer = EagleLayer(base, EagleSizes(shape, RopeConfig(), WIDTH), tokens and torch.tensor(tokens), 128)
    name = "layers.0."
    stacked = {
        "fc.weight": mine["fc.weight"],
        "qkv.weight": torch.cat([mine[f"{name}self_attn.{part}_proj.weight"] for part in "qkv"]),
        "output.weight": mine[f"{name}self_attn.o_proj.weight"],
        "norm": mine[f"{name}post_attention_layernorm.weight"],
        "gate_up.weight": torch.cat([mine[f"{name}mlp.{part}_proj.weight"] for part in ("gate", "up")]),
        "down.weight": mine[f"{name}mlp.down_proj.weight"],
    }
    if "fc.bias" in mine:
        layer.fc.bias = torch.nn.Parameter(mine["fc.bias"])
        stacked["fc.bias"] = mine["fc.bias"]
    layer.load_state_dict(stacked)
    return layer


@torch.inference_mode()
def layer_guesses(layer: EagleLayer, context: Sequence[tuple[Tensor, int]], steps: int) -> list[int]:
    """Returns the guesses behind a context of states, each with the token that it drew."""
    known = torch.stack([state for state, _ in context])[None]
    drawn, guesses = torch.tensor([[token for _, token in context]]), list[Tensor]()

    def tokens(step: int, states: Tensor) -> Tensor:
        guesses.extend([layer.guesses(states)] if step else [])
        return guesses[-1] if step else drawn

    guesses.append(layer.guesses(layer.chain(known, tokens, steps)[-1]))
    return [int(guess[0, -1]) for guess in guesses]
