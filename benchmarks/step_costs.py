"""Measures mixed steps and a fitted cost model's predictions of them; see the command below.

`python -m benchmarks.step_costs --device cuda --shape llama-3-8b`

Placement and chunk sizes use the cost model (`tandem/cost_model/step_cost.py`). A worker fits it to its own steps, so
its errors are those of its form. Here steps of many sizes run back to back as in a worker, a model is fitted to them
as a worker does it, and each size's time is compared with its prediction. The last line is one JSON object.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise, product

from benchmarks.command_line import exit_on_error
from benchmarks.load.served_model import add_model_options, choose_model
from benchmarks.results import run_facts, save_result
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.cost_model.step_fit import StepFit
from tandem.cost_model.step_work import StepWork
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import SamplingParams

_GREEDY = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
_WARM = 2
"""Steps of a size that are not timed."""
_TOKEN = 7


@dataclass(frozen=True, slots=True)
class Size:
    """A step: `tokens` of a prompt after `context` earlier ones, and `answers` decoding requests.

    Each decoding request has `answer_context` tokens.
    """

    answers: int
    tokens: int
    context: int
    answer_context: int

    @property
    def work(self) -> StepWork:
        """The step's work as a worker records it; a decode row attends to its own token, too."""
        decode = StepWork(decode_rows=self.answers, decode_context_tokens=self.answers * (self.answer_context + 1))
        return decode.with_chunk(self.tokens, self.context) if self.tokens else decode

    def batch(self, kv: KvPages) -> StepBatch:
        """Returns the step's rows, each on its own pages."""
        lengths = [self.answer_context + 1] * self.answers + [self.context + self.tokens] * (self.tokens > 0)
        ends = accumulate((kv.numbers(length) * kv.groups for length in lengths), initial=0)
        pages = [range(first, end) for first, end in pairwise(ends)]
        rows = [StepRow([_TOKEN], self.answer_context, pages[row], _GREEDY) for row in range(self.answers)]
        if self.tokens:
            rows.append(StepRow([_TOKEN] * self.tokens, self.context, pages[-1], _GREEDY))
        return StepBatch(rows)


@dataclass(frozen=True, slots=True)
class Timed:
    """The median step of a size in seconds, and whether a CUDA graph computed it."""

    size: Size
    seconds: float
    graph: bool


def sizes(answers: Sequence[int], tokens: Sequence[int], contexts: Sequence[int], answer_context: int) -> list[Size]:
    """Returns all combinations except for the empty step; steps without a prompt have one context only."""
    found = (Size(*each, answer_context) for each in product(answers, tokens, contexts))
    return list(
        dict.fromkeys(
            each if each.tokens else Size(each.answers, 0, 0, answer_context)
            for each in found
            if each.answers or each.tokens
        )
    )


def measure(runner: ModelRunner, size: Size, steps: int) -> Timed:
    """Times steps of one size, each launched before the one before is read where the runner can."""
    hits = runner.graph_use.hits
    times = list(_results(runner, size.batch(runner.kv_pages), _WARM + steps))
    gaps = [after - before for before, after in pairwise(times)]
    return Timed(size, statistics.median(gaps[_WARM - 1 :]), runner.graph_use.hits - hits == _WARM + steps)


def _results(runner: ModelRunner, batch: StepBatch, steps: int) -> Iterator[float]:
    """Yields the times at which results arrive."""
    pending = runner.launch(batch)
    for _ in range(steps - 1):
        launched = runner.launch(batch) if runner.asynchronous else None
        pending()
        yield time.perf_counter()
        pending = launched or runner.launch(batch)
    pending()
    yield time.perf_counter()


def fitted(guess: CostParameters, timed: Sequence[Timed], rounds: int) -> CostParameters:
    """Returns the parameters of a worker that has seen these sizes `rounds` times, in random order."""
    fit, dice = StepFit(guess), random.Random(0)
    for _ in range(rounds):
        for each in dice.sample(timed, len(timed)):
            fit.observe(each.size.work, each.seconds)
    return fit.parameters


def figures(timed: Sequence[Timed], parameters: CostParameters) -> dict[str, object]:
    """Returns each size with time / prediction, and the extremes with and without CUDA graphs, for JSON."""
    cost = StepCost(parameters)
    steps = [
        asdict(each.size)
        | {
            "ms": round(each.seconds * 1e3, 3),
            "graph": each.graph,
            "over_predicted": round(each.seconds / cost.seconds(each.size.work), 3),
        }
        for each in timed
    ]
    found: dict[str, object] = {"steps": steps, "fitted": asdict(parameters)}
    for name, graph in (("graphs", True), ("launched", False)):
        ratios = sorted(each["over_predicted"] for each in steps if each["graph"] is graph)
        if ratios:
            found |= {f"{name}_over_predicted_least": ratios[0], f"{name}_over_predicted_most": ratios[-1]}
    return found


def as_lines(found: dict[str, object]) -> Iterator[str]:
    """Yields a line for each size."""
    steps = found["steps"]
    assert isinstance(steps, list)
    for each in steps:
        yield (
            f"{each['answers']:4} answers, {each['tokens']:5} tokens behind {each['context']:6}:"
            f" {each['ms']:8.3f} ms, {each['over_predicted']:.2f} x predicted{'' if each['graph'] else ', no graph'}"
        )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_costs", description=(__doc__ or "").split("\n")[0])
    add_model_options(parser)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--answers", default="0,4,16,40", help="numbers of answers")
    parser.add_argument("--tokens", default="0,32,112,240,368,496,624,752,880,1008,1264,1520,1776,2032", help="chunks")
    parser.add_argument("--contexts", default="0,2048,6000,12288", help="tokens of the prompt before the chunk")
    parser.add_argument("--answer-context", type=int, default=1500, help="tokens of each answer and its prompt")
    parser.add_argument("--steps", type=int, default=8, help="of each size")
    parser.add_argument("--rounds", type=int, default=20, help="of learning")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    return parser.parse_args(arguments)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, fits and prints; JSON last."""
    parsed = parse_arguments(arguments)
    answers, tokens, contexts = _numbers(parsed.answers), _numbers(parsed.tokens), _numbers(parsed.contexts)
    with exit_on_error():
        model = choose_model(parsed.model, parsed.shape)
        runner = ModelRunner.load(
            EngineConfig(
                model.folder,
                device=parsed.device,
                random_weights=model.random_weights,
                max_step_tokens=max(answers) + max(tokens),
                max_batch_requests=max(1, *answers),
            )
        )
    longest = runner.facts.max_context - 1
    every = [
        each
        for each in sizes(answers, tokens, contexts, min(parsed.answer_context, longest - 1))
        if each.context + each.tokens <= longest
    ]
    timed = [measure(runner, size, parsed.steps) for size in every]
    found = figures(timed, fitted(runner.cost_guess, timed, parsed.rounds))
    print("\n".join(as_lines(found)))
    result = {"model": model.name, "dtype": runner.facts.dtype, **found, **run_facts(parsed.device)}
    if parsed.save:
        print("saved", save_result(f"step-costs-{model.name}", result))
    print(json.dumps({name: value for name, value in result.items() if name != "steps"}))


if __name__ == "__main__":
    main()
