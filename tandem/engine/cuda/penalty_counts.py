"""Token counts for penalties on the device: how often each token occurs in a request's prompt and output.

Steps are launched before the host knows the tokens of the previous step, so the sampler itself adds each sampled token
to the counts of its request. The rows of counts belong to this store, which assigns one to the `History` of a request
that samples with penalties; requests do not acquire or return rows. If a row lacks some tokens of its request (because
the request is new here, or its row was reused meanwhile), all tokens are counted again: from the history and, for a
token that the host does not have yet, from the device. So an aborted request leaves nothing to clean up, and the number
of rows bounds the memory.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.cuda.sampler_cuda import IN_PROMPT
from tandem.engine.steps.sampling_metadata import History, SamplingInput


@dataclass(slots=True)
class _CountsSlot:
    """A request's row of counts, and the number of output tokens that it counts once all launched steps have run."""

    row: int
    counted: int


class PenaltyCounts:
    """Owns `counts` [rows, vocab_size] int32, which `DeviceSampler.sample` reads and updates.

    The counts take 4 · rows · vocab_size bytes.
    """

    def __init__(self, vocab_size: int, rows: int, device: torch.device) -> None:
        self.counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self._lent: OrderedDict[History, _CountsSlot] = OrderedDict()
        """The histories that have a row, least recently used first."""

    def place(self, draws: Sequence[SamplingInput], late: Sequence[Tensor | None]) -> list[int]:
        """Return the row of counts of each sampling input, brought up to date; -1 for an input without penalties.

        The next kernels that are launched must be the sampler's. `late` has, for each input, the last token of its
        output [1] int64 on the device, or None if the history has it. Inputs with penalties must belong to different
        requests, and must not outnumber the rows of counts. The call only launches kernels, and never waits.
        """
        # Marked as used first, so that no row of this step is reassigned to another of its requests.
        for sampling_input in draws:
            if sampling_input.history is not None and sampling_input.history in self._lent:
                self._lent.move_to_end(sampling_input.history)
        return [
            -1
            if sampling_input.history is None or not sampling_input.sampling.penalized
            else self._ready(sampling_input.history, token)
            for sampling_input, token in zip(draws, late, strict=True)
        ]

    def _ready(self, history: History, late: Tensor | None) -> int:
        lent = self._lent.get(history) or self._lend(history)
        tokens = len(history.answer) + (late is not None)
        if lent.counted != tokens:
            self._count(self.counts[lent.row], history, late)
        # The sampler will add the token that it samples in this step.
        lent.counted = tokens + 1
        return lent.row

    def _lend(self, history: History) -> _CountsSlot:
        """Assign a free row, or the least recently used one, to `history`; its counts are not valid yet."""
        full = len(self._lent) == len(self.counts)
        row = self._lent.popitem(last=False)[1].row if full else len(self._lent)
        lent = self._lent[history] = _CountsSlot(row, counted=-1)
        return lent

    def _count(self, row: Tensor, history: History, late: Tensor | None) -> None:
        device = self.counts.device
        token_ids = torch.tensor(
            [*history.prompt, *history.answer], dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        prompt, answer = token_ids.to(device, non_blocking=True).tensor_split([len(history.prompt)])
        if late is not None:
            # A row without a token (NO_TOKEN, -1) counts as token 0, because its request ends anyway.
            answer = torch.cat((answer, late.clamp(min=0)))
        row.zero_()
        row.index_fill_(0, prompt, IN_PROMPT)
        row.index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))
