"""The whole training: the model answers prompts, heads learn from most answers and are judged on the others."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.cache.paged_cache import cache_bytes
from engine.config import EngineConfig
from engine.config.kv import kv_groups
from engine.config.model import ModelSpec
from engine.device import parse_device, parse_kv_dtype, parse_page_tokens
from engine.draft_training.answers import BATCH, Answer, Answering, tokens_a_step
from engine.draft_training.train_heads import (
    BaseWeights,
    HeadSizes,
    TrainedHeads,
    frequent_tokens,
    train_heads,
    write_heads,
)
from engine.kernels.packed_weight import PackedWeight
from engine.model_runner import ModelRunner
from engine.models.allocation import allocate_parameters
from engine.models.load_spec import load_spec
from engine.weights.checkpoint import Progress, load_weights
from wire.errors import InvalidArgument

ANSWER_TOKENS = 128
"""The most tokens of an answer."""
_HELD_OUT = 10
"""Every tenth prompt is held out, with all its answers."""
_ANSWER_MIN = 8
"""Tokens of an answer that are counted on; prompts are answered again, with other seeds, until there are enough."""
_SPARE_PAGES = 4


@dataclass(frozen=True, slots=True)
class Recipe:
    """The settings of a training."""

    tokens: int
    """The tokens that the model answers, those held out included."""
    heads: int
    layers: int
    vocabulary: int
    epochs: int
    temperature: float
    """The temperature of the answers; 0 answers each prompt once."""
    seed: int


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a training."""

    tokens: int
    """The tokens that were learned from."""
    held_out_tokens: int
    losses: Sequence[float]
    """The loss of each epoch, see `train_heads`."""
    tokens_a_step: Sequence[float]
    """The tokens a step on the answers held out, with at most 1, 2, … drafts."""


def train_draft(
    config: EngineConfig, output: Path, prompts: Sequence[Sequence[int]], recipe: Recipe, progress: Progress
) -> Trained:
    """Train heads for the model of `config` and write them to `output`.

    `prompts` are token ids. InvalidArgument if `output` exists, there is no prompt, or a setting cannot be met;
    ModelError for a model that cannot be served.
    """
    if output.exists():
        raise InvalidArgument("out", f"{output} exists; name a folder that does not.")
    spec = load_spec(config.model)
    torch.manual_seed(recipe.seed)
    answers = _answer(config, spec, prompts, recipe, progress)
    # All answers to a prompt are alike: the prompt is held out, unless it is the only one.
    different = len(prompts) if len(prompts) > 1 else len(answers)
    taught = [each for number, each in enumerate(answers) if number % different % _HELD_OUT]
    held_out = [each for number, each in enumerate(answers) if number % different % _HELD_OUT == 0]
    if not any(len(each.token_ids) > 1 for each in taught):
        raise InvalidArgument("tokens", "the answers are too short to learn from; ask for more tokens.")
    base = _base_weights(config, spec, progress)
    token_map = frequent_tokens(taught, recipe.vocabulary, spec.vocab_size)
    if token_map is not None:
        token_map = token_map.to(base.projection.device)
    heads = TrainedHeads(base, HeadSizes(recipe.heads, recipe.layers, recipe.vocabulary), token_map)
    losses = train_heads(heads, taught, epochs=recipe.epochs, seed=recipe.seed, progress=progress)
    guesses = [heads.guess(each.hidden) for each in held_out]
    known = [each.token_ids for each in held_out]
    gains = [tokens_a_step(guesses, known, drafts) for drafts in range(1, recipe.heads + 1)]
    result = Trained(_count(taught), _count(held_out), losses, gains)
    write_heads(output, heads, spec, {**asdict(recipe), **asdict(result)})
    return result


def _answer(
    config: EngineConfig, spec: ModelSpec, prompts: Sequence[Sequence[int]], recipe: Recipe, progress: Progress
) -> list[Answer]:
    if not prompts:
        raise InvalidArgument("text", "has no paragraph to answer.")
    longest, device = max(map(len, prompts)) + ANSWER_TOKENS, parse_device(config.device)
    page_tokens = parse_page_tokens(config, device)
    pages = -(-longest // page_tokens) * BATCH * len(kv_groups(spec)) + _SPARE_PAGES
    capacity = cache_bytes(spec, pages, page_tokens, parse_kv_dtype(config, device, spec))
    sized = EngineConfig(
        config.model,
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        kv_cache_bytes=capacity,
        max_batch_requests=BATCH,
        keep_hidden=True,
    )
    rounds = -(-recipe.tokens // (_ANSWER_MIN * len(prompts))) if recipe.temperature else 1
    answering = Answering(ModelRunner.load(sized, progress), recipe.temperature, recipe.seed)
    found: list[Answer] = []
    done = 0
    for some in answering.answers(list(prompts) * rounds, ANSWER_TOKENS):
        found += some
        done += _count(some)
        progress("answering prompts", min(1.0, done / recipe.tokens))
        if done >= recipe.tokens:
            break
    return found


def _base_weights(config: EngineConfig, spec: ModelSpec, progress: Progress) -> BaseWeights:
    device = parse_device(config.device)
    parameters = allocate_parameters(spec, torch.float32, device)
    load_weights(config.model, spec, parameters, progress)
    projection = parameters.lm_head
    if isinstance(projection, PackedWeight):
        projection = projection.dequantized(torch.float32)
    return BaseWeights(parameters.final_norm.clone(), projection.clone(), spec.norm_eps)


def _count(answers: Sequence[Answer]) -> int:
    return sum(len(each.token_ids) for each in answers)
