"""Samples tokens and computes log probabilities on the device; it only launches kernels, and never waits."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tandem.engine.cuda.penalty_counts import PenaltyCounts
from tandem.engine.cuda.sampler_cuda import MANY_ROWS, PARAMS, DeviceSampler
from tandem.engine.grammar_masks import GrammarMasks
from tandem.engine.kernels.sampling.triton_logprobs import MOST_TOP, logprobs
from tandem.engine.logits_mask import MaskedLogits
from tandem.engine.logprobs import scores_of, wants_logprobs
from tandem.engine.steps.sampling_metadata import History, SamplingInput, SamplingMetadata
from tandem.protocol.messages import SamplingParams, TokenLogprobs

Drawn = tuple[list[int], list[TokenLogprobs | None]]
"""The sampled tokens of a step and their log probabilities; the second list is empty if no row wants any."""

_TRIAL_TOKEN = 0


@dataclass(frozen=True, slots=True)
class DrawMemory:
    """Host memory from and to which a step's sampling data is copied; it is in use until the step has run."""

    params: Tensor
    rows: Tensor
    tokens: Tensor
    values: Tensor
    top_ids: Tensor

    @classmethod
    def of(cls, most: int, device: torch.device) -> "DrawMemory":
        """Allocate memory for up to `most` sampling rows; it is pinned if `device` is a GPU."""

        def memory(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(*sizes, dtype=dtype, pin_memory=device.type == "cuda")

        return cls(
            params=memory(most, PARAMS, dtype=torch.float64),
            rows=memory(most, dtype=torch.int64),
            tokens=memory(most, dtype=torch.int64),
            # One-dimensional, because only contiguous memory is copied without waiting, and the number of alternatives,
            # the length of a row, differs between steps.
            values=memory(most * (1 + MOST_TOP), dtype=torch.float32),
            top_ids=memory(most * MOST_TOP, dtype=torch.int64),
        )


class TokenDraws:
    """Samples the tokens of every step into `drawn`, from which the next step reads them."""

    def __init__(
        self,
        sampler: DeviceSampler,
        counts: PenaltyCounts,
        drawn: Tensor,
        eos_token_ids: Sequence[int] = (),
        masks: GrammarMasks | None = None,
        *,
        pdl: bool,
    ) -> None:
        """Create the sampler of a stepper's steps; it writes the tokens to `drawn`.

        `drawn` is [maximum number of sampling rows] int64; `counts` has as many rows as `sampler` samples at once. None
        of `eos_token_ids` is sampled where an output may not end yet, and no token that `masks` forbids.
        """
        self._sampler = sampler
        self._counts = counts
        self._drawn = drawn
        self._eos_token_ids = eos_token_ids
        self._masks = masks
        self._pdl = pdl

    def make_memory(self) -> DrawMemory:
        """Allocate host memory for one step."""
        return DrawMemory.of(len(self._drawn), self._drawn.device)

    def late_tokens(self, draws: Sequence[SamplingInput], sources: Sequence[int | None]) -> list[Tensor | None]:
        """Return, for each sampling input with a history, the token [1] that the host does not have yet.

        This is the token that the previous step sampled at the input's index in `sources`. The result is None for an
        input without a history or without a source. Must be called before anything of this step is launched, because
        the step may overwrite the tokens of the previous one.
        """
        if all(
            sampling_input.history is None or source is None
            for sampling_input, source in zip(draws, sources, strict=True)
        ):
            return [None] * len(draws)
        before = self._drawn.clone()
        return [
            None if sampling_input.history is None or source is None else before[source : source + 1]
            for sampling_input, source in zip(draws, sources, strict=True)
        ]

    def launch(
        self,
        logits: Tensor,
        draws: Sequence[SamplingInput],
        late: Sequence[Tensor | None],
        memory: DrawMemory,
        *,
        greedy_is_drawn: bool,
    ) -> Callable[[], Drawn]:
        """Sample a token for each row of logits [at least sampled rows, vocab]; `late` is from `late_tokens`.

        If `greedy_is_drawn`, the most likely tokens are in `drawn` already, so a step with only greedy rows, without
        masks or penalties, needs no sampling. Returns a function that reads the result from `memory`; it may be called
        only once the device has finished the step.
        """
        draws = SamplingMetadata.of(draws)
        if draws.masked or draws.constrained:
            masked = MaskedLogits(logits, draws, self._eos_token_ids, self._masks)
            self._sample(logits, draws, late, memory)
            masked.restore()
        elif not (greedy_is_drawn and draws.greedy and not draws.looks_back):
            self._sample(logits, draws, late, memory)
        count = len(draws)
        memory.tokens[:count].copy_(self._drawn[:count], non_blocking=True)
        if not draws.scored:
            return lambda: (memory.tokens[:count].tolist(), [])
        asking = [row for row, sampling_input in enumerate(draws) if wants_logprobs(sampling_input)]
        values, top_ids = self._score(logits, draws, asking, memory)
        return lambda: (memory.tokens[:count].tolist(), scores_of(draws, values.tolist(), top_ids.tolist()))

    def score_tokens(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor]:
        """Return the log probabilities of tokens [n] as `tandem.engine.logprobs.logprobs` does.

        It only launches kernels.
        """
        return logprobs(logits, tokens, torch.arange(len(tokens), device=tokens.device), top, pdl=self._pdl)

    def trials(self, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
        """Return trial sampling calls of every kind for `run_side_by_side`.

        They compile the kernels before the first request.
        """

        def run(penalty: float) -> None:
            for rows, temperature in itertools.product({1, min(MANY_ROWS, self._sampler.max_rows)}, (0.0, 1.0)):
                logits = torch.zeros(rows, self._counts.counts.shape[1], dtype=dtype, device=self._drawn.device)
                asked = SamplingParams(1, temperature, presence_penalty=penalty, logprobs=1)
                draws = [
                    SamplingInput(asked, 0, History((_TRIAL_TOKEN,), ()) if penalty else None) for _ in range(rows)
                ]
                self.launch(logits, draws, [None] * rows, self.make_memory(), greedy_is_drawn=False)

        # Sampling with penalties is a single trial, because only one step at a time may use the counts.
        return {"draws": partial(run, 0.0), "draws with penalties": partial(run, 1.0)}

    def _sample(
        self, logits: Tensor, draws: SamplingMetadata, late: Sequence[Tensor | None], memory: DrawMemory
    ) -> None:
        """Sample all rows, in batches of at most as many rows as the sampler takes."""
        most = self._sampler.max_rows
        penalized = draws.looks_back
        for first in range(0, len(draws), most):
            some = slice(first, min(first + most, len(draws)))
            counted = self._counts.place(draws[some], late[some]) if penalized else None
            plan = self._sampler.plan(draws[some], counted, memory.params[some].numpy())
            params = memory.params[some].to(self._drawn.device, non_blocking=True)
            self._sampler.sample(
                logits[some],
                params,
                self._drawn[some],
                greedy_only=plan.greedy_only,
                counts=self._counts.counts if penalized else None,
            )

    def _score(
        self, logits: Tensor, draws: Sequence[SamplingInput], asking: Sequence[int], memory: DrawMemory
    ) -> tuple[Tensor, Tensor]:
        """Launch the computation of log probabilities, and return the host memory that will receive them.

        `asking` has the n rows that want log probabilities. The memory is [n, 1 + top] float32 for the log
        probabilities and [n, top] int64 for the token ids.
        """
        count = len(asking)
        top = min(max(draws[row].sampling.logprobs or 0 for row in asking), logits.shape[1])
        memory.rows[:count] = torch.tensor(asking)
        rows = memory.rows[:count].to(self._drawn.device, non_blocking=True)
        scores = logprobs(logits, self._drawn, rows, top, pdl=self._pdl)
        values = memory.values[: count * (1 + top)].view(count, 1 + top)
        top_ids = memory.top_ids[: count * top].view(count, top)
        values.copy_(scores[0], non_blocking=True)
        top_ids.copy_(scores[1], non_blocking=True)
        return values, top_ids
