"""Teacher-forced comparison of two engines: both read the same text, step by step, and predict each next token.

The first half of each sample is scored as a prompt, in chunks; the second half in decode steps, with one known token
for each of several samples. This compares the kernels of both phases, over a KV cache that prefill has filled. Both
engines run each step one after the other, so that only one step's logits are in memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from tandem.engine.model_runner import ModelRunner
from tandem.engine.quality.divergence import Divergence, DivergenceSum
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import SamplingParams

Sample = Sequence[int]
Scored = Callable[[float], None]
"""A callback that gets the completed fraction of the comparison, 0 to 1."""

CHUNK_TOKENS = 256
"""The number of prompt tokens in a step, which bounds the memory of logits.

They take 131 MB in float32 for a vocabulary of 128k tokens.
"""
COMPANY = 16
"""The number of samples that are decoded in the same step."""
_DRAW = SamplingInput(SamplingParams(max_tokens=1), 0)


@dataclass(frozen=True, slots=True)
class Quality:
    """The divergence of the candidate from the reference, for each phase."""

    prefill: Divergence
    decode: Divergence


class StepRows:
    """Builds the step rows of samples; the pages of a sample are consecutive in the runner's cache.

    No one else may use the runner.
    """

    def __init__(self, runner: ModelRunner, tokens: int, samples: int) -> None:
        """Assign pages to `samples` samples of `tokens` tokens each.

        Raises InvalidArgument if the cache has fewer pages.
        """
        self._pages = -(-tokens // runner.page_tokens) * len(runner.cache.groups)
        if self._pages * samples > runner.cache.pages:
            raise InvalidArgument(
                "kv_cache_bytes",
                f"{samples} samples of {tokens} tokens need {self._pages * samples} pages of KV, "
                f"the cache has {runner.cache.pages}; give it more memory.",
            )

    def row(self, number: int, token_ids: Sample, start: int, *, drawn: bool = True) -> StepRow:
        """Return a row with tokens of sample `number`, which start at position `start`."""
        pages = range(number * self._pages, (number + 1) * self._pages)
        return StepRow(token_ids, start, pages, _DRAW if drawn else None)


def compare(
    reference: ModelRunner, candidate: ModelRunner, samples: Sequence[Sample], progress: Scored | None = None
) -> Quality:
    """Compare two engines on samples, which are token sequences of equal length, at least 4 tokens.

    Raises InvalidArgument if the vocabularies differ, or if a sample does not fit into a context or a KV cache.
    """
    runners = (reference, candidate)
    length = len(samples[0])
    if reference.spec.vocab_size != candidate.spec.vocab_size:
        raise InvalidArgument(
            "candidate",
            f"its vocabulary has {candidate.spec.vocab_size} tokens, the reference's {reference.spec.vocab_size}; "
            "only models that predict the same tokens can be compared.",
        )
    if length > (context := min(runner.facts.max_context for runner in runners)):
        raise InvalidArgument("tokens", f"samples of {length} tokens do not fit into a context of {context} tokens.")
    rows = [StepRows(runner, length, min(COMPANY, len(samples))) for runner in runners]
    sums = {"prefill": DivergenceSum(), "decode": DivergenceSum()}
    done = 0
    for phase, tokens, following in _steps(samples):
        batches = [
            StepBatch([step_rows.row(number, ids, start) for number, start, ids in tokens]) for step_rows in rows
        ]
        first, second = (
            runner.logits(batch, every_token=phase == "prefill") for runner, batch in zip(runners, batches, strict=True)
        )
        with torch.inference_mode():
            sums[phase].add(first, second, torch.tensor(following))
        done += len(following)
        if progress is not None:
            progress(done / (len(samples) * (length - 1)))
    return Quality(sums["prefill"].result(), sums["decode"].result())


Piece = tuple[int, int, Sample]
"""A piece of a sample: the sample's number in its group, a position, and the tokens from that position on."""


def _steps(samples: Sequence[Sample]) -> Iterator[tuple[str, list[Piece], list[int]]]:
    """Yield each step: its phase, its pieces, and for each token of the pieces the token that follows it."""
    half = len(samples[0]) // 2
    for first in range(0, len(samples), COMPANY):
        group = samples[first : first + COMPANY]
        yield from chain.from_iterable(_prompt_steps(number, sample[: half + 1]) for number, sample in enumerate(group))
        for position in range(half, len(group[0]) - 1):
            pieces = [(number, position, sample[position : position + 1]) for number, sample in enumerate(group)]
            yield "decode", pieces, [sample[position + 1] for sample in group]


def _prompt_steps(number: int, prompt: Sample) -> Iterator[tuple[str, list[Piece], list[int]]]:
    """Yield the prefill steps of a sample's first half; the last token of `prompt` is predicted, but not read."""
    for start in range(0, len(prompt) - 1, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(prompt) - 1)
        yield "prefill", [(number, start, prompt[start:end])], list(prompt[start + 1 : end + 1])
