"""Measures what common prefixes of prompts save: `python -m benchmarks.serving prefixes --device cpu`.

A cluster of one worker answers prompts, one after the other, of which a share of the tokens is cached: TTFT, and the
time saved against a prompt without cached tokens ÷ what the cost model that the worker has fitted predicts. The same
cluster without a prefix cache shows what looking up costs when nothing is cached. Then prompts with the prefixes of
three uses: the turns of a conversation, 16 answers to a prompt, and a tree of prompts as of a beam search. Last,
without a cluster: the fill of pages that requests take as they grow, and of a contiguous allocation at the maximum
length.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.cluster import add_model_options, choose_model, running_cluster
from benchmarks.command_line import Measured, at_least
from benchmarks.results import run_facts
from tandem.capacity.planner.demand import Demand
from tandem.capacity.planner.reading import fitted
from tandem.cli.load.synthetic import Lengths
from tandem.cli.observe.top import scrape
from tandem.client import Client
from tandem.cost_model.step_cost import StepCost
from tandem.protocol.cost_parameters import CostParameters
from tandem.settings.engine import EngineSettings

SHARES = (0.0, 0.05, 0.2, 0.5, 0.8, 0.95)
TURNS, BRANCHES, DEPTH, ANSWERS = 6, 4, 2, 16
PAGE_SIZES = (1, 16, 64, 128, 256)
LEARNING = 24
"""Prompts and answers before the measurement, from which the worker fits its cost model."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client saw of a prompt: seconds to its first token, its tokens, and those that were cached.

    Both numbers of tokens are sums over the answers to the prompt.
    """

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


Ask = Callable[[Sequence[int], int], Asked]
"""Sends a prompt and asks for that many answers."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    add_model_options(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--prompt-tokens", type=at_least(64), default=1024, help="of each prompt")
    parser.add_argument("--rounds", type=at_least(1), default=7, help="prompts of each share")
    parser.add_argument(
        "--answer-tokens", default="lognormal:300:0.8", help="for pages: a number, or lognormal:MEAN:SIGMA"
    )
    parser.add_argument("--context", type=at_least(2), default=8192, help="for pages: the maximum length")


def measure(options: argparse.Namespace) -> Measured:
    """Measure with and without a prefix cache."""
    model = choose_model(options.model, options.shape)
    settings = {"device": options.device, "mode": "colocated", "workers": 1}
    tokens, rounds = options.prompt_tokens, options.rounds
    with running_cluster(model, settings | {"prefix_cache": False}) as listeners, Client(listeners.grpc) as client:
        ask = partial(_ask, client)
        learn(ask, tokens)
        without_s = statistics.median(ask(fresh(tokens, number), 1).ttft_s for number in range(rounds))
    with running_cluster(model, settings) as listeners, Client(listeners.grpc) as client:
        ask = partial(_ask, client)
        learn(ask, tokens)
        shares = share_rows(ask, tokens, rounds)
        uses = use_rows(ask, tokens)
        costs = fitted(asyncio.run(scrape(listeners.metrics, listeners.metrics_key)))
    lengths = Lengths(tokens, 0.8), Lengths.parse("--answer-tokens", options.answer_tokens)
    result = {
        "model": model.name,
        "prompt_tokens": tokens,
        "shares": with_predictions(shares, tokens, costs),
        "lookup_over_none": round(float(shares[0]["ttft_ms"]) / (without_s * 1e3), 4),
        "uses": uses,
        "pages": page_rows(lengths[0], lengths[1], options.context),
        "dtype": "bfloat16" if options.device != "cpu" else "float32",
        **run_facts(options.device),
    }
    return f"prefixes-{model.name}", result


def _ask(client: Client, prompt: Sequence[int], answers: int) -> Asked:
    began = time.monotonic()
    stream = client.stream_generate(list(prompt), max_tokens=2, temperature=0.0, ignore_eos=True, n=answers)
    first_s = next(chunk.received_s for chunk in stream if chunk.token_ids)
    every = stream.answers()
    return Asked(first_s - began, sum(one.prompt_tokens for one in every), sum(one.cached_tokens for one in every))


def fresh(tokens: int, seed: int) -> list[int]:
    """Return random token ids that begin as no other prompt with another `seed`."""
    return random.Random(seed).choices(range(1000, 20_000), k=tokens)


def learn(ask: Ask, tokens: int) -> None:
    """Send prompts of several lengths, so that the worker compiles its kernels and fits its cost model."""
    for number in range(LEARNING):
        ask(fresh(max(1, tokens * (1 + number % 4) // 4), -1 - number), 1)


def share_rows(ask: Ask, tokens: int, rounds: int) -> list[dict[str, float]]:
    """Return and print the median TTFT of prompts of which each share is cached, and the tokens that were."""
    rows = []
    for number, share in enumerate(SHARES):
        common = fresh(round(share * tokens), 1_000_000 + number)
        if common:
            ask(common, 1)
        made = [ask(common + fresh(tokens - len(common), 1000 * (2 + number) + turn), 1) for turn in range(rounds)]
        cached = statistics.median(one.cached_tokens for one in made)
        ttft_ms = statistics.median(one.ttft_s for one in made) * 1e3
        rows.append({"share": share, "cached_tokens": cached, "ttft_ms": round(ttft_ms, 3)})
        print(rows[-1], flush=True)
    return rows


def with_predictions(
    rows: Sequence[dict[str, float]], tokens: int, costs: CostParameters | None
) -> list[dict[str, float]]:
    """Return the rows with the time that the cache saved ÷ the prediction; without `costs` or a saving, without it."""
    if costs is None:
        return list(rows)
    cost, chunk = StepCost(costs), EngineSettings().max_step_tokens

    def predicted_ms(cached: float) -> float:
        return Demand(1.0, tokens, 1.0, cached / tokens).lone_prompt_seconds(cost, chunk) * 1e3

    made = []
    for row in rows:
        saving_ms = predicted_ms(0) - predicted_ms(row["cached_tokens"])
        saved_ms = rows[0]["ttft_ms"] - row["ttft_ms"]
        made.append(row | ({"saved_over_predicted": round(saved_ms / saving_ms, 3)} if saving_ms > 0 else {}))
    return made


def use_rows(ask: Ask, tokens: int) -> list[dict[str, object]]:
    """Return and print, for each use, the tokens of all prompts, those that were computed, and those that are distinct.

    Computed tokens above the distinct ones are what the cache's whole pages leave out.
    """
    part = max(1, tokens // TURNS)
    turns = [ask(fresh(part * (turn + 1), 50_000_000), 1) for turn in range(TURNS)]
    several = [ask(fresh(tokens, 60_000_000), ANSWERS)]
    tree, nodes = [], [fresh(tokens // 2, 70_000_000)]
    tree.append(ask(nodes[0], 1))
    for level in range(DEPTH):
        nodes = [
            node + fresh(part, 80_000_000 + 1000 * level + 10 * number + branch)
            for number, node in enumerate(nodes)
            for branch in range(BRANCHES)
        ]
        tree += [ask(node, 1) for node in nodes]
    nodes_of_tree = sum(BRANCHES**level for level in range(1, DEPTH + 1))
    rows: list[dict[str, object]] = []
    for use, made, distinct in (
        ("turns", turns, part * TURNS),
        (f"{ANSWERS} answers", several, tokens),
        ("tree", tree, tokens // 2 + part * nodes_of_tree),
    ):
        prompts = sum(one.prompt_tokens for one in made)
        computed = sum(one.prompt_tokens - one.cached_tokens for one in made)
        ttft_ms = round(made[-1].ttft_s * 1e3, 3)
        rows.append(
            {"use": use, "prompt_tokens": prompts, "computed": computed, "distinct": distinct, "last_ttft_ms": ttft_ms}
        )
        print(rows[-1], flush=True)
    return rows


def page_rows(prompts: Lengths, answers: Lengths, context: int, requests: int = 1000) -> list[dict[str, float]]:
    """Return the share of the allocated memory that has tokens, over the decoding of random requests, by page size.

    A request takes a page when its tokens need one. `contiguous` is the fill if each request has `context` tokens from
    the beginning.
    """
    generator = np.random.default_rng(0)
    drawn = zip(prompts.draw(generator, requests), answers.draw(generator, requests), strict=True)
    held = np.concatenate(
        [np.arange(min(prompt, context - 1), min(prompt + answer, context)) for prompt, answer in drawn]
    )
    contiguous = round(float(held.mean()) / context, 4)
    return [
        {
            "page_tokens": size,
            "fill": round(float(held.sum() / (np.ceil(held / size) * size).sum()), 4),
            "contiguous": contiguous,
        }
        for size in PAGE_SIZES
    ]
