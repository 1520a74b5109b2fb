"""Measures the speedup of answers by draft tokens: `python -m benchmarks.speculation`.

SmolLM2 answers real text. Each prompt set is answered by one worker without draft tokens and by one with them,
alternating in equal batches, so that other load of the machine affects both. Their tokens must be the same. In 16 bits
on a GPU (`--device cuda`), products of other sizes round differently, so there the answers that differ are counted.
With `--shape` the model has random weights, and draft tokens are accepted at random (`step_table.py`).
"""

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.command_line import Measured, at_least
from benchmarks.results import run_facts
from benchmarks.speculation import step_table
from benchmarks.speculation.local_worker import LocalWorker
from benchmarks.speculation.step_table import StepTable
from router.text.chat_template import ChatTurn
from router.text.tokenizer import Tokenizer
from tandem.cli.models.default_model import find_default_model
from tandem.cli.models.random_model import random_model
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.weights.gguf import prepare_model
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod

SETS = ("copying", "code", "chat")
"""The prompt sets, 48 prompts each: passages to repeat or edit; functions to complete, test or rewrite; questions."""
TEXTS = Path(__file__).parent / "texts"


def read_prompts(name: str) -> list[str]:
    """Return the prompts of one of `SETS`."""
    content = json.loads((TEXTS / f"{name}.json").read_text(encoding="utf-8"))
    return [entry["prompt"] for entry in content["prompts"]]


def encode_prompts(tokenizer: Tokenizer, name: str) -> list[list[int]]:
    """Return the token ids of the prompts of one of `SETS`, each formatted as the only message of a conversation."""
    return [tokenizer.encode_chat([ChatTurn("user", prompt)]) for prompt in read_prompts(name)]


KV_BYTES, GPU_KV_BYTES = 256 << 20, 4 << 30
GPU_BATCHES = (1, 8, 32)
"""Concurrent requests on a GPU, where steps with more rows take hardly longer."""
WARM_UP_TOKENS = 16


@dataclass(slots=True)
class Decoded:
    """The tokens that one worker has decoded, and the time that they took."""

    tokens: int = 0
    """Tokens after the first one of each answer."""
    seconds: float = 0.0
    """The sum, over batches, of the time from a batch's first token to its last."""

    @property
    def per_s(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


async def answer(worker: LocalWorker, prompts: Sequence[Sequence[int]], most: int, into: Decoded) -> list[list[int]]:
    """Answer a batch of prompts greedily, add it to `into`, and return the answers."""
    answers = [worker.send(prompt, SamplingParams(most)) for prompt in prompts]
    await asyncio.gather(*(reply.finished.wait() for reply in answers))
    into.tokens += sum(len(reply.token_ids) - 1 for reply in answers)
    into.seconds += max(reply.last_s for reply in answers) - min(reply.first_s for reply in answers)
    return [reply.token_ids for reply in answers]


async def compare(
    workers: Sequence[LocalWorker], prompts: Sequence[Sequence[int]], batch: int, most: int, *, exact: bool
) -> tuple[Decoded, Decoded, int]:
    """Let both workers answer the prompts, batch by batch; the last result is the number of answers that differ.

    Raises SystemExit if `exact` and any answer differs.
    """
    plain, drafting, different = Decoded(), Decoded(), 0
    for number, first in enumerate(range(0, len(prompts), batch)):
        some = prompts[first : first + batch]
        turns = [(workers[0], plain), (workers[1], drafting)]
        answers = [await answer(worker, some, most, into) for worker, into in turns[:: 1 if number % 2 else -1]]
        different += sum(one != other for one, other in zip(*answers, strict=True))
        if different and exact:
            raise SystemExit(f"the answers to prompts {first} to {first + len(some)} differ")
    return plain, drafting, different


async def measure_set(
    runners: Sequence[ModelRunner],
    engines: Sequence[EngineConfig],
    method: str,
    prompts: Sequence[Sequence[int]],
    *,
    batch: int,
    most: int,
) -> dict[str, object]:
    """Return the figures of one prompt set."""
    async with (
        LocalWorker.open(runners[0], engines[0], SpeculationMethod.OFF) as off,
        LocalWorker.open(runners[1], engines[1], SpeculationMethod(method)) as on,
    ):
        for worker in (off, on):
            await answer(worker, prompts[:batch], WARM_UP_TOKENS, Decoded())
        exact = not engines[1].draft_graphs or runners[1].facts.dtype == "float32"
        plain, drafting, different = await compare((off, on), prompts, batch, most, exact=exact)
        counts = on.speculation.counts
    drafted, accepted = sum(counts.drafted.values()), sum(counts.accepted.values())
    return {
        "batch": batch,
        "prompts": len(prompts),
        "different_answers": different,
        "tokens": plain.tokens,
        "plain_tokens_per_s": round(plain.per_s, 2),
        "tokens_per_s": round(drafting.per_s, 2),
        "speedup": round(drafting.per_s / plain.per_s, 3),
        "tokens_a_step": round(drafting.tokens / max(1, drafting.tokens - accepted), 3),
        "drafted": drafted,
        "accepted": accepted,
        "drafting_share": round(counts.drafting_s / drafting.seconds, 4),
    }


async def measure_sets(chosen: argparse.Namespace, console: Console) -> dict[str, object]:
    """Return the figures of the prompt sets."""
    folder = prepare_model(find_default_model())
    tokenizer = Tokenizer(folder)
    on_gpu = chosen.device != "cpu"
    batches = chosen.batch or (GPU_BATCHES if on_gpu else (1,))
    engines = [
        EngineConfig.of(
            folder,
            device=chosen.device,
            dtype=chosen.dtype,
            kv_cache_bytes=(GPU_KV_BYTES if on_gpu else KV_BYTES) * (2 if drafts and chosen.draft else 1),
            max_batch_requests=max(batches),
            draft_graphs=on_gpu and drafts,
            draft=chosen.draft if drafts else None,
            threads=chosen.threads,
        )
        for drafts in (False, True)
    ]
    runners = [ModelRunner.load(engine) for engine in engines]
    rows: list[dict[str, object]] = []
    for batch in batches:
        for name in chosen.sets:
            prompts = encode_prompts(tokenizer, name)[: chosen.prompts]
            row = await measure_set(runners, engines, chosen.method, prompts, batch=batch, most=chosen.tokens)
            rows.append({"set": name, **row})
            console.print(rows[-1])
    console.print(table_of(rows))
    dtype = runners[0].facts.dtype
    method = chosen.method if chosen.draft is None else f"{chosen.method} {chosen.draft.name}"
    return {"model": folder.name, "method": method, "dtype": dtype, "rows": rows, **run_facts(chosen.device)}


async def measure_shape(chosen: argparse.Namespace, console: Console) -> dict[str, object]:
    """Return the figures of a model with random weights; see `StepTable`."""
    on_gpu = chosen.device != "cpu"
    batches = chosen.batch or list(step_table.WANTED)
    engine = EngineConfig.of(
        random_model(chosen.shape),
        device=chosen.device,
        dtype="bfloat16" if on_gpu and chosen.dtype == "auto" else chosen.dtype,
        kv_cache_bytes=None if on_gpu else KV_BYTES,
        max_batch_requests=max(batches),
        random_weights=True,
        draft=chosen.draft,
        mtp=chosen.method == SpeculationMethod.MTP,
        draft_graphs=True,
        threads=chosen.threads,
    )
    began = time.perf_counter()
    runner = ModelRunner.load(engine)
    start_s = round(time.perf_counter() - began, 1)
    console.print(f"started in {start_s} s")
    method = SpeculationMethod(chosen.method)
    table = StepTable(runner, engine, context=chosen.context, steps=chosen.steps, method=method)
    rows = await table.rows(batches, console)
    console.print(step_table.table_of(rows))
    facts = {"context": chosen.context, "steps": chosen.steps, "start_s": start_s, "drafts": "accepted by chance"}
    return {
        "model": chosen.shape,
        "method": chosen.method,
        "dtype": runner.facts.dtype,
        **facts,
        "rows": rows,
        **run_facts(chosen.device),
    }


def table_of(rows: Sequence[dict[str, object]]) -> Table:
    """Return the figures as a table."""
    table = Table("prompts", "batch", "tokens/s without", "with drafts", "times as fast", "tokens a step", "accepted")
    for row in rows:
        names = ("set", "batch", "plain_tokens_per_s", "tokens_per_s", "speedup", "tokens_a_step")
        table.add_row(*(str(row[name]) for name in names), f"{row['accepted']} of {row['drafted']}")
    return table


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--method", default=SpeculationMethod.NGRAM.value, help="how drafts are proposed (ngram)")
    parser.add_argument("--draft", type=Path, help="the folder of --method draft")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="prompt sets (all)")
    parser.add_argument("--shape", help="a model's shape, of random weights (llama-3-8b, ...)")
    parser.add_argument(
        "--batch", nargs="+", type=at_least(1), help="requests at a time (1; on GPUs 1, 8, 32; 1 to 128 of a shape)"
    )
    parser.add_argument("--context", type=at_least(1), default=1024, help="tokens of a shape's prompts (1024)")
    parser.add_argument("--steps", type=at_least(2), default=100, help="steps of a shape's figure (100)")
    parser.add_argument("--prompts", type=at_least(1), default=48, help="prompts of each set (48)")
    parser.add_argument("--tokens", type=at_least(2), default=96, help="most tokens of an answer (96)")
    parser.add_argument("--device", default="cpu", help="as in `tandem up` (cpu)")
    parser.add_argument("--dtype", default="auto", help="as in `tandem up` (auto)")
    parser.add_argument("--threads", type=at_least(1), help="CPU threads (all)")


def measure(options: argparse.Namespace) -> Measured:
    """Measure answers to the prompt sets or, with `--shape`, steps of a model with random weights."""
    measured = measure_shape if options.shape else measure_sets
    result = asyncio.run(measured(options, Console()))
    return f"speculation-speed-{result['model']}", result
