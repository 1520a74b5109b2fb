"""The complete training of draft heads: the model decodes prompts, and heads are trained on most of the outputs.

The heads are evaluated on the other outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.cache.paged_cache import cache_bytes
from tandem.engine.config import EngineConfig
from tandem.engine.config.kv import kv_groups
from tandem.engine.config.model import ModelSpec
from tandem.engine.device import parse_device, parse_dtype, parse_kv_dtype, parse_pages
from tandem.engine.draft_training.answers import BATCH, Answer, AnswerGenerator, tokens_a_step
from tandem.engine.draft_training.eagle_layer import EagleLayer, EagleSizes
from tandem.engine.draft_training.train_eagle import eagle_guesses, train_eagle, write_eagle
from tandem.engine.draft_training.train_heads import (
    BaseWeights,
    HeadSizes,
    TrainedHeads,
    frequent_tokens,
    train_heads,
    write_heads,
)
from tandem.engine.kernels.packed_weight import PackedWeight, Weight
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import allocate_ends
from tandem.engine.speculation.heads.folder import check_final_norm
from tandem.engine.weights.checkpoint import Progress, check_model, load_weights
from tandem.protocol.errors import InvalidArgument

MEDUSA, EAGLE = "medusa", "eagle"
KINDS = (MEDUSA, EAGLE)
"""The kinds of heads that can be trained."""
ANSWER_TOKENS = 128
"""Maximum number of tokens of an output."""
_HELD_OUT = 10
"""One in `_HELD_OUT` prompts is held out for evaluation, with all its outputs."""
_ANSWER_MIN = 8
"""The assumed minimum number of tokens of an output.

Prompts are decoded again, with other seeds, until there are enough tokens. The number of repetitions is limited to that
which suffices if outputs have `_ANSWER_MIN` tokens.
"""
_SPARE_PAGES = 4


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The settings of a training run."""

    kind: str
    """One of `KINDS`."""
    tokens: int
    """The number of tokens that the model decodes, including held-out tokens."""
    heads: int
    """The number of Medusa heads, or of consecutive draft tokens with which an EAGLE head is evaluated."""
    layers: int
    """The number of layers of each Medusa head; an EAGLE head has one."""
    vocabulary: int
    epochs: int
    temperature: float
    """The sampling temperature of the outputs; at 0, each prompt is decoded only once."""
    seed: int


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a training run."""

    tokens: int
    """The number of tokens that were trained on."""
    held_out_tokens: int
    losses: Sequence[float]
    """The mean loss of each epoch; see `train_heads` and `train_eagle`."""
    tokens_a_step: Sequence[float]
    """The mean tokens per decode step on the held-out outputs, with at most 1, 2, … draft tokens."""


def train_draft(
    config: EngineConfig, output: Path, prompts: Sequence[Sequence[int]], recipe: TrainingConfig, progress: Progress
) -> Trained:
    """Train Medusa heads or an EAGLE head for the model of `config`, and write the heads to `output`.

    `prompts` are token ids. Raises InvalidArgument if `output` exists, if there is no prompt, or if a setting cannot be
    met; ModelError if the model cannot be served.
    """
    if output.exists():
        raise InvalidArgument("out", f"{output} exists; name a folder that does not.")
    spec = check_model(config.served.model)
    check_final_norm(spec)
    if recipe.kind not in KINDS:
        raise InvalidArgument("kind", f"{recipe.kind!r} is not known; use {' or '.join(KINDS)}.")
    if recipe.kind == EAGLE:
        EagleSizes.of(spec)
    torch.manual_seed(recipe.seed)
    taught, held_out = make_answers(config, spec, prompts, recipe, progress)
    if not any(len(answer.token_ids) > 1 for answer in taught):
        raise InvalidArgument("tokens", "the answers are too short to learn from; ask for more tokens.")
    learned = learn(base_weights(config, spec), spec, taught, recipe, progress)
    result = Trained(_count(taught), _count(held_out), learned.losses, learned.gains(held_out, recipe.heads))
    learned.write(output, {**asdict(recipe), **asdict(result)})
    return result


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The trained heads as the evaluation needs them.

    They are represented by their losses, a function that predicts draft tokens, and a function that writes their
    folder.
    """

    losses: Sequence[float]
    guess: Callable[[Answer], list[list[int]]]
    """Returns the predicted draft tokens [tokens][drafts] after each token of an output."""
    write: Callable[[Path, dict[str, object]], None]
    """Writes the folder for `--draft`, together with facts about the training."""

    def gains(self, answers: Sequence[Answer], drafts: int) -> list[float]:
        """Return the mean tokens per decode step on these outputs, with at most 1, 2, … draft tokens."""
        guesses, known = [self.guess(answer) for answer in answers], [answer.token_ids for answer in answers]
        return [tokens_a_step(guesses, known, most) for most in range(1, drafts + 1)]


def learn(
    base: BaseWeights,
    spec: ModelSpec,
    answers: Sequence[Answer],
    recipe: TrainingConfig,
    progress: Progress | None = None,
) -> EvalResult:
    """Train Medusa heads or an EAGLE head, as `recipe` says, on outputs of the model."""
    token_map = frequent_tokens(answers, recipe.vocabulary, spec.vocab_size)
    if token_map is not None:
        token_map = token_map.to(base.projection.device)
    if recipe.kind == EAGLE:
        layer = EagleLayer(base, EagleSizes.of(spec), token_map, ANSWER_TOKENS + recipe.heads)
        losses = train_eagle(layer, answers, epochs=recipe.epochs, seed=recipe.seed, progress=progress)
        return EvalResult(
            losses, lambda answer: eagle_guesses(layer, answer, recipe.heads), partial(write_eagle, layer, spec)
        )
    heads = TrainedHeads(base, HeadSizes(recipe.heads, recipe.layers, recipe.vocabulary), token_map)
    losses = train_heads(heads, answers, epochs=recipe.epochs, seed=recipe.seed, progress=progress)
    return EvalResult(losses, lambda answer: heads.guess(answer.hidden), partial(write_heads, heads, spec))


def make_answers(
    config: EngineConfig, spec: ModelSpec, prompts: Sequence[Sequence[int]], recipe: TrainingConfig, progress: Progress
) -> tuple[list[Answer], list[Answer]]:
    """Return the outputs of the model in two lists: those for training, and those for evaluation."""
    answers = _answer(config, spec, prompts, recipe, progress)
    # All outputs for a prompt are similar, so a prompt is held out with all of them, unless it is the only prompt.
    different = len(prompts) if len(prompts) > 1 else len(answers)
    taught = [answer for number, answer in enumerate(answers) if number % different % _HELD_OUT]
    return taught, [answer for number, answer in enumerate(answers) if number % different % _HELD_OUT == 0]


def _answer(
    config: EngineConfig, spec: ModelSpec, prompts: Sequence[Sequence[int]], recipe: TrainingConfig, progress: Progress
) -> list[Answer]:
    if not prompts:
        raise InvalidArgument("text", "has no paragraph to answer.")
    longest, device = max(map(len, prompts)) + ANSWER_TOKENS, parse_device(config.device)
    spec, page_tokens = parse_pages(config, device, spec)
    pages = -(-longest // page_tokens) * BATCH * len(kv_groups(spec)) + _SPARE_PAGES
    dtypes = parse_kv_dtype(config, device, spec), parse_dtype(config, device, spec)
    capacity = cache_bytes(spec, pages, page_tokens, *dtypes)
    sized = EngineConfig(
        config.served,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        kv_cache_bytes=capacity,
        max_batch_requests=BATCH,
        keep_hidden=True,
    )
    rounds = -(-recipe.tokens // (_ANSWER_MIN * len(prompts))) if recipe.temperature else 1
    answering = AnswerGenerator(ModelRunner.load(sized, progress), recipe.temperature, recipe.seed)
    answers: list[Answer] = []
    done = 0
    for some in answering.answers(list(prompts) * rounds, ANSWER_TOKENS):
        answers += some
        done += _count(some)
        progress("answering prompts", min(1.0, done / recipe.tokens))
        if done >= recipe.tokens:
            break
    return answers


def base_weights(config: EngineConfig, spec: ModelSpec) -> BaseWeights:
    """Return the model's weights from which the training starts, in the dtype of `config`; only these are read."""
    device = parse_device(config.device)
    dtype = parse_dtype(config, device, spec)
    parameters = allocate_ends(spec, dtype, device)
    load_weights(config.served.model, spec, parameters)

    def plain(weight: Weight) -> Tensor:
        return weight.dequantized(dtype) if isinstance(weight, PackedWeight) else weight

    return BaseWeights(parameters.final_norm, plain(parameters.lm_head), spec.norm_eps, plain(parameters.embedding))


def _count(answers: Sequence[Answer]) -> int:
    return sum(len(answer.token_ids) for answer in answers)
