"""Token counts for penalties, on the device: how often each request's prompt and answer contain each token.

Steps are launched before the host knows the tokens of the one before, so the sampler itself adds each drawn token to
its request's row. Rows are neither acquired nor returned by requests: they belong to this store, which lends one to the
`History` of a draw. A draw whose tokens are not all counted (the request's first here, or one whose row was reused
meanwhile) has them counted again, from the history and, for a token that the host does not have yet, from the device.
So an aborted request leaves nothing to clean up, and memory is bounded by the number of rows.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.cuda.sampler_cuda import IN_PROMPT
from tandem.engine.steps.sampling_metadata import History, SamplingInput


@dataclass(slots=True)
class _Lent:
    """A row, and how many tokens of the answer are counted in it once the launched steps have run."""

    row: int
    counted: int


class PenaltyCounts:
    """Owns `counts` [rows, vocab_size] int32, as `DeviceSampler.sample` takes them: 4 · rows · vocab_size bytes."""

    def __init__(self, vocab_size: int, rows: int, device: torch.device) -> None:
        self.counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self._lent: OrderedDict[History, _Lent] = OrderedDict()
        """Histories with a row, least recently used first."""

    def place(self, draws: Sequence[SamplingInput], late: Sequence[Tensor | None]) -> list[int]:
        """Returns the row of each draw, -1 for one without penalties, ready for the sampler, which must run next.

        `late`: for each draw the last token of its answer [1] int64 on the device, None if the history has it. At most
        as many draws with penalties as there are rows, each of another request. Only launches, never waits.
        """
        for draw in draws:
            if draw.history is not None and draw.history in self._lent:
                self._lent.move_to_end(draw.history)
        return [
            -1 if draw.history is None or not draw.sampling.penalized else self._ready(draw.history, token)
            for draw, token in zip(draws, late, strict=True)
        ]

    def _ready(self, history: History, late: Tensor | None) -> int:
        lent = self._lent.get(history) or self._lend(history)
        tokens = len(history.answer) + (late is not None)
        if lent.counted != tokens:
            self._count(self.counts[lent.row], history, late)
        lent.counted = tokens + 1
        return lent.row

    def _lend(self, history: History) -> _Lent:
        """Lends a free row, or the least recently used one; its contents are invalid."""
        full = len(self._lent) == len(self.counts)
        row = self._lent.popitem(last=False)[1].row if full else len(self._lent)
        lent = self._lent[history] = _Lent(row, counted=-1)
        return lent

    def _count(self, row: Tensor, history: History, late: Tensor | None) -> None:
        device = self.counts.device
        token_ids = torch.tensor(
            [*history.prompt, *history.answer], dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        prompt, answer = token_ids.to(device, non_blocking=True).tensor_split([len(history.prompt)])
        if late is not None:
            answer = torch.cat((answer, late.clamp(min=0)))  # the request of a row without a token ends
        row.zero_()
        row.index_fill_(0, prompt, IN_PROMPT)
        row.index_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))
