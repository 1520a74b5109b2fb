"""Trains heads of both kinds on the same answers and compares them: `python -m benchmarks.speculation.trained_heads`.

The model answers prompts once; Medusa heads and an EAGLE head learn from nine tenths of the prompts. On the others
drafts are accepted while they equal the answer, as in serving. The EAGLE head is also judged with a context that begins
anew every few tokens, as behind a prompt or steps without drafts. The last line is JSON.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import at_least, exit_on_error
from benchmarks.results import run_facts, save_result
from tandem.cli.drafts.train_draft import prompts_of
from tandem.cli.models.default_model import find_default_model
from tandem.cli.progress import progress_bars
from tandem.engine.config import EngineConfig
from tandem.engine.draft_training.answers import Answer
from tandem.engine.draft_training.train_draft import EAGLE, MEDUSA, Learned, Recipe, base_weights, learn, make_answers
from tandem.engine.models.load_spec import load_spec
from tandem.engine.weights.gguf import prepare_model

DRAFTS = 4
CONTEXTS = (1, 4, 16)
"""The most tokens of the contexts that begin anew."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for, and print JSON last."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speculation.trained_heads", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--model", type=Path, help="folder or GGUF file (SmolLM2-135M)")
    parser.add_argument("--tokens", type=at_least(100), default=10_000, help="tokens that the model answers (10,000)")
    parser.add_argument("--medusa-epochs", type=at_least(1), nargs="+", default=[3, 12], help="passes (3 and 12)")
    parser.add_argument("--eagle-epochs", type=at_least(1), nargs="+", default=[12, 24], help="passes (12 and 24)")
    parser.add_argument("--vocabulary", type=at_least(1), default=8192, help="tokens that can be guessed (8,192)")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads (all)")
    parser.add_argument("--text", type=Path, help="file whose paragraphs are the prompts (a built-in one)")
    parser.add_argument("--out", type=Path, help="folder for what was trained, one folder for each")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    chosen = parser.parse_args(arguments)
    with exit_on_error():
        result = measure(chosen, Console())
        if chosen.save:
            print("saved", save_result(f"speculation-heads-{result['model']}", result))
    print(json.dumps(result))


def measure(chosen: argparse.Namespace, console: Console) -> dict[str, object]:
    """Answer the prompts, train both kinds, print the table and return the result for JSON."""
    folder = prepare_model(chosen.model or find_default_model())
    spec, config = load_spec(folder), EngineConfig(folder, threads=chosen.threads)
    if chosen.threads is not None:
        torch.set_num_threads(chosen.threads)
    answering = Recipe(MEDUSA, chosen.tokens, DRAFTS, 1, chosen.vocabulary, 1, 0.7, 0)
    with progress_bars(console) as report:
        taught, held_out = make_answers(config, spec, prompts_of(folder, chosen.text), answering, report)
        base = base_weights(config, spec)
        rows = []
        for kind, passes in ((MEDUSA, chosen.medusa_epochs), (EAGLE, chosen.eagle_epochs)):
            for epochs in passes:
                recipe = replace(answering, kind=kind, epochs=epochs)
                torch.manual_seed(recipe.seed)
                began = time.perf_counter()
                learned = learn(base, spec, taught, recipe, report)
                row: dict[str, object] = {
                    "kind": kind,
                    "epochs": epochs,
                    "seconds": round(time.perf_counter() - began, 1),
                    "losses": [round(loss, 4) for loss in learned.losses],
                    "tokens_a_step": [round(gain, 4) for gain in learned.gains(held_out, DRAFTS)],
                }
                if kind == EAGLE:
                    row["with_contexts_of"] = {most: anew(learned, held_out, most) for most in CONTEXTS}
                if chosen.out is not None:
                    learned.write(chosen.out / f"{kind}-{epochs}", asdict(recipe))
                rows.append(row)
    console.print(table_of(rows))
    tokens = {
        name: sum(len(each.token_ids) for each in some) for name, some in (("taught", taught), ("held", held_out))
    }
    facts = {"taught_tokens": tokens["taught"], "held_out_tokens": tokens["held"], "recipe": asdict(answering)}
    return {"model": folder.name, "dtype": "float32", **facts, "rows": rows, **run_facts("cpu")}


def anew(learned: Learned, answers: Sequence[Answer], most: int) -> list[float]:
    """Return the tokens a step by drafts if contexts have at most `most` tokens: the latest since they began anew."""

    def guess(answer: Answer) -> list[list[int]]:
        starts = range(0, len(answer.token_ids), most)
        pieces = [Answer(answer.token_ids[n : n + most], answer.hidden[n : n + most]) for n in starts]
        return [guessed for piece in pieces for guessed in learned.guess(piece)]

    return [round(gain, 4) for gain in replace(learned, guess=guess).gains(answers, DRAFTS)]


def table_of(rows: Sequence[dict[str, object]]) -> Table:
    """Return the figures as a table."""
    columns = (f"k = {drafts}" for drafts in range(1, DRAFTS + 1))
    table = Table("kind", "passes", "s", *columns, title="tokens a step on answers held out")
    for row in rows:
        gains = row["tokens_a_step"]
        assert isinstance(gains, list)
        table.add_row(str(row["kind"]), str(row["epochs"]), str(row["seconds"]), *(f"{gain:.3f}" for gain in gains))
    return table


if __name__ == "__main__":
    main()
