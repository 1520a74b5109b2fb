"""Measures how many tokens a step gains from drafts on real text: `python -m benchmarks.speculation.acceptance`.

SmolLM2 answers three sets of prompts greedily; the proposers are then replayed over these answers. Drafts are accepted
while they equal the greedy answer, as in serving, so that no model runs twice. Each set is one worker's life: its
answers come one after the other, for one cache salt. The last line is JSON.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.command_line import at_least, exit_on_error
from benchmarks.results import run_facts, save_result
from benchmarks.speculation.greedy_answers import greedy_answers
from benchmarks.speculation.heads_acceptance import heads_tokens_a_step
from benchmarks.speculation.prompt_sets import SETS, encode_prompts
from benchmarks.speculation.replay import Replay, measure_time
from router.text.tokenizer import Tokenizer
from tandem.cli.models.default_model import find_default_model
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.ngram import NgramProposer
from tandem.engine.speculation.proposer import DRAFT_SOURCES, DraftSource, Proposer
from tandem.engine.speculation.suffix import SuffixProposer
from tandem.engine.weights.gguf import prepare_model

PROPOSERS: Mapping[str, type[Proposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}
DRAFTS = (1, 2, 3, 4, 5, 7)
SHOWN = 4
"""The drafts of a step for which acceptance by match is shown."""
KV_BYTES = 512 << 20
"""Holds the longest prompts of a batch and their answers."""

Answers = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Prompts with their answers."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for, and print JSON last."""
    chosen = _parse(arguments)
    with exit_on_error():
        result = measure(chosen, Console())
        if chosen.save:
            print("saved", save_result(f"speculation-acceptance-{result['model']}", result))
    print(json.dumps(result))


def measure(chosen: argparse.Namespace, console: Console) -> dict[str, object]:
    """Answer the prompts, replay the proposers, print the tables and return the result for JSON."""
    folder = prepare_model(chosen.model or find_default_model())
    tokenizer = Tokenizer(folder)
    config = EngineConfig(folder, device=chosen.device, dtype=chosen.dtype, draft=chosen.draft, threads=chosen.threads)
    runner = ModelRunner.load(replace(config, kv_cache_bytes=KV_BYTES))
    if chosen.draft is not None:
        return _heads(chosen, console, runner, tokenizer)
    answers: dict[str, Answers] = {}
    for name in SETS:
        console.print(f"answering the prompts of the set {name}")
        prompts = encode_prompts(tokenizer, name)[: chosen.prompts]
        answers[name] = list(zip(prompts, greedy_answers(runner, prompts, chosen.tokens), strict=True))
    replays = {name: replay_all(make, answers) for name, make in PROPOSERS.items()}
    times = {name: measure_time(make) for name, make in PROPOSERS.items()}
    console.print(_gain_table(replays))
    console.print(_match_table(replays))
    for name, spent in times.items():
        console.print(
            f"{name}: {spent.begin_ms:.1f} ms for a prompt of 8,192 tokens, then {spent.step_us:.1f} µs a token and "
            f"look-up, {spent.leave_us:.1f} µs a token at the end"
        )
    return {
        "model": folder.name,
        "dtype": runner.facts.dtype,
        "prompts": chosen.prompts,
        "tokens": chosen.tokens,
        "proposers": {
            name: {
                each: {str(most): _figures(replay) for most, replay in by_most.items()}
                for each, by_most in by_set.items()
            }
            for name, by_set in replays.items()
        },
        "times": {name: asdict(spent) for name, spent in times.items()},
        **run_facts(chosen.device),
    }


def _heads(
    chosen: argparse.Namespace, console: Console, runner: ModelRunner, tokenizer: Tokenizer
) -> dict[str, object]:
    """Let heads guess while the model answers, print the table and return the result for JSON."""
    table = Table("set", *(f"k = {most}" for most in DRAFTS), title="tokens a step with trained heads")
    found = {}
    for name in SETS:
        console.print(f"answering the prompts of the set {name}")
        prompts = encode_prompts(tokenizer, name)[: chosen.prompts]
        found[name] = heads_tokens_a_step(runner, prompts, chosen.tokens, DRAFTS)
        table.add_row(name, *(f"{gain:.2f}" for gain in found[name].values()))
    console.print(table)
    return {
        "model": f"{runner.facts.name}-heads",
        "dtype": runner.facts.dtype,
        "prompts": chosen.prompts,
        "tokens": chosen.tokens,
        "tokens_a_step": found,
        **run_facts(chosen.device),
    }


def replay_all(make: type[Proposer], answers: Mapping[str, Answers]) -> dict[str, dict[int, Replay]]:
    """Return the replay of each set, by its name and by the most drafts of a step."""
    return {name: {most: replay_set(make(), found, most) for most in DRAFTS} for name, found in answers.items()}


def replay_set(proposer: Proposer, answers: Answers, most: int) -> Replay:
    """Return the replay of answers that come one after the other, with at most `most` drafts in a step."""
    replay = Replay()
    for key, (prompt, answer) in enumerate(answers):
        replay.add(proposer, key, prompt, answer, most)
    return replay


def _figures(replay: Replay) -> dict[str, object]:
    return {
        "tokens_a_step": replay.tokens_a_step,
        "steps": replay.steps,
        **{
            name: dict(sorted(getattr(replay, name).items()))
            for name in ("drafted", "accepted", "first_drafted", "first_accepted")
        },
    }


def _gain_table(replays: Mapping[str, Mapping[str, Mapping[int, Replay]]]) -> Table:
    table = Table(
        "set", "proposer", *(f"k = {most}" for most in DRAFTS), title="tokens a step / accepted part of drafts"
    )
    for each in SETS:
        for name, by_set in replays.items():
            cells = (f"{it.tokens_a_step:.2f} / {_part(it.accepted, it.drafted)}" for it in by_set[each].values())
            table.add_row(each, name, *cells)
    return table


def _match_table(replays: Mapping[str, Mapping[str, Mapping[int, Replay]]]) -> Table:
    sources = [source for source in DRAFT_SOURCES if source.match]
    names = [f"{source.proposer} {source.match}" for source in sources]
    title = f"first drafts that are accepted, and their number, by proposer and match; k = {SHOWN}"
    table = Table("set", "proposer", *names, title=title)
    for each in SETS:
        for name, by_set in replays.items():
            it = by_set[each][SHOWN]
            cells = (
                f"{it.first_accepted[source] / it.first_drafted[source]:.2f} ({it.first_drafted[source]})"
                if it.first_drafted[source]
                else "-"
                for source in sources
            )
            table.add_row(each, name, *cells)
    return table


def _part(accepted: Mapping[DraftSource, int], drafted: Mapping[DraftSource, int]) -> str:
    whole = sum(drafted.values())
    return f"{sum(accepted.values()) / whole:.2f}" if whole else "-"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation.acceptance", description=description)
    parser.add_argument("--model", type=Path, help="Hugging Face folder or GGUF file (SmolLM2)")
    parser.add_argument("--draft", type=Path, help="folder of trained heads, which are measured instead")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    parser.add_argument("--dtype", default="float32", help="(float32)")
    parser.add_argument("--threads", type=at_least(1), help="of the CPU (all cores)")
    parser.add_argument("--prompts", type=at_least(1), default=48, help="the first prompts of each set (48)")
    parser.add_argument("--tokens", type=at_least(2), default=96, help="the most tokens of an answer (96)")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
