"""Samples tokens on the device, with the same result as `tandem.engine.sampler` and without waiting for the device.

The host packs the parameters and the seeded random number of each row into one array before the logits exist; the
device does the rest. The order of the filters, the handling of ties and the inversion of the cumulative distribution
are those of `tandem.engine.sampler`. Sums are exact here, in fixed point, so a token may differ only if a float32
probability rounds to the other side of a filter's threshold or of the random number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.kernels.sampling import triton_choice, triton_sampling
from tandem.engine.steps.sampling_metadata import NUMBER, SETTINGS, SamplingInput, SamplingMetadata

PARAMS: int = triton_sampling.PARAMS.value
ALIGNED: int = triton_sampling.ALIGNED.value
CANDIDATES: int = triton_sampling.CANDIDATES.value
SPLITS: int = triton_sampling.SPLITS.value
BINS: int = triton_sampling.BINS.value
IN_PROMPT: int = triton_sampling.IN_PROMPT.value
"""The bit of a token count that is set if the prompt contains the token (see `DeviceSampler.sample`)."""

MASS_BITS = 62
"""The sum of a row's weights in fixed point is at most 2**62, so that it fits into an int64.

A token's weight is at most 1, and a weight of 1 is stored as 2**62 / V, where V is the vocabulary size rounded up to a
power of 2.
"""
TILE, TILE_WARPS = 2048, 4
CHOICE_TILE, CHOICE_WARPS = 4096, 16
MANY_ROWS = 16
"""Minimum number of rows with which large blocks keep the device busy; fewer rows use small blocks."""
LARGE_BLOCK, LARGE_WARPS = 8192, 8
SMALL_BLOCK, SMALL_WARPS = 2048, 4


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The sampling parameters of a step in the format that the device reads: params [rows, PARAMS] float64.

    `greedy_only` is True if every row is greedy.
    """

    params: NDArray[np.float64]
    greedy_only: bool


class DeviceSampler:
    """Samples tokens of up to `max_rows` rows of `vocab_size` logits.

    Owns about 4 · max_rows · vocab_size bytes of scratch memory. Only one step at a time may use it: launches on one
    stream, or CUDA graphs that run one after another.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device, pdl: bool) -> None:
        self._vocab = vocab_size
        self.max_rows = max_rows
        self._pdl = pdl
        self._shift = MASS_BITS - (vocab_size - 1).bit_length()
        part = triton.cdiv(vocab_size, SPLITS)
        self._split_tokens = triton.cdiv(part, TILE) * TILE
        self._splits = triton.cdiv(vocab_size, self._split_tokens)
        # The number of small blocks is used for large ones too, so that later kernels do not depend on the number of
        # rows.
        self._padded_blocks = triton.next_power_of_2(triton.cdiv(vocab_size, SMALL_BLOCK))
        self._row_stride = CANDIDATES + triton.cdiv(vocab_size, ALIGNED) * ALIGNED

        def scratch(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(max_rows, *sizes, dtype=dtype, device=device)

        # Token 0 everywhere: while kernels are compiled concurrently, the launch that fills this tensor may be skipped,
        # and the next kernel uses the token that it reads from it as an address.
        self._best = scratch(triton.cdiv(vocab_size, SMALL_BLOCK), dtype=torch.int64)
        self._best.fill_(triton_sampling.LOW_HALF.value)
        self._weights = scratch(self._row_stride, dtype=torch.float32)
        self._ids = scratch(CANDIDATES, dtype=torch.int32)
        self._candidate_counts = scratch(2, dtype=torch.int32)
        self._masses = scratch(SPLITS, dtype=torch.int64)
        self._histograms = scratch(SPLITS, BINS, dtype=torch.int32)

    @staticmethod
    def plan(
        draws: Sequence[SamplingInput], counted: Sequence[int] | None = None, into: NDArray[np.float64] | None = None
    ) -> SamplingPlan:
        """Pack the sampling inputs `draws` row by row, into `into` [rows, PARAMS] if given; nothing is launched.

        `counted` has the row of token counts of each input, -1 without penalties; None if no input has penalties.
        """
        columns = SamplingMetadata.of(draws)
        params = np.empty((len(draws), PARAMS)) if into is None else into
        params[:, :SETTINGS] = columns.settings
        params[:, SETTINGS] = -1 if counted is None else counted
        greedy = columns.greedy
        if not greedy:
            params[:, NUMBER] = columns.numbers()
        return SamplingPlan(params, greedy)

    def sample(
        self, logits: Tensor, params: Tensor, out: Tensor, *, greedy_only: bool, counts: Tensor | None = None
    ) -> None:
        """Launch the sampling of one token per row, into out [R] int64, without waiting for the device.

        logits       [R, vocab_size], contiguous rows, any float dtype
        params       [R, PARAMS] float64 on the device: the `params` of a plan
        greedy_only  the plan's value; if True, two short launches suffice
        counts       [any, vocab_size] int32 contiguous, or None if no row has a penalty. The row that the plan names
                     has the number of times that the output contains each token so far, plus IN_PROMPT if the prompt
                     contains it; the token sampled here is added. No two rows may share a row of counts.

        The id is NO_TOKEN in rows whose largest logit is not finite.
        """
        rows, vocab = logits.shape
        assert rows <= self.max_rows, f"{rows} rows: the sampler was made for {self.max_rows}"
        assert vocab == self._vocab, f"{vocab} tokens: the sampler was made for {self._vocab}"
        # Without penalties no kernel reads the counts, but each kernel still needs a pointer.
        seen = self._ids if counts is None else counts
        penalties = counts is not None
        blocks = self._find_best(logits, params, seen, penalties=penalties)
        if greedy_only:
            self._take_best(params, out, seen, blocks, penalties=penalties)
        else:
            self._weigh(logits, params, seen, blocks, penalties=penalties)
            self._collect(params, rows)
            self._choose(params, out, seen, blocks, penalties=penalties)

    def _find_best(self, logits: Tensor, params: Tensor, seen: Tensor, *, penalties: bool) -> int:
        """Find the token with the highest logit in each block of the vocabulary; return the number of blocks.

        The result is in `_best`.
        """
        large = len(logits) >= MANY_ROWS
        block = LARGE_BLOCK if large else SMALL_BLOCK
        blocks: int = triton.cdiv(self._vocab, block)
        triton_sampling.best_of_block[(len(logits), blocks)](
            logits,
            logits.stride(0),
            seen,
            params,
            self._best,
            self._vocab,
            BLOCK=block,
            PENALTIES=penalties,
            PDL=self._pdl,
            num_warps=LARGE_WARPS if large else SMALL_WARPS,
            launch_pdl=self._pdl,
        )
        return blocks

    def _take_best(self, params: Tensor, out: Tensor, seen: Tensor, blocks: int, *, penalties: bool) -> None:
        triton_sampling.take_best[(len(out),)](
            self._best,
            out,
            seen,
            params,
            blocks,
            self._vocab,
            BLOCKS=self._padded_blocks,
            PENALTIES=penalties,
            PDL=self._pdl,
            num_warps=1,
            launch_pdl=self._pdl,
        )

    def _weigh(self, logits: Tensor, params: Tensor, seen: Tensor, blocks: int, *, penalties: bool) -> None:
        """Compute the weights of all tokens, and the sum and histogram of the weights of each split of the vocabulary.

        The weights are in `_weights`. Greedy rows are skipped.
        """
        triton_sampling.weigh[(len(logits), self._splits)](
            logits,
            logits.stride(0),
            seen,
            params,
            self._best,
            self._weights,
            self._masses,
            self._histograms,
            self._vocab,
            blocks,
            self._row_stride,
            self._split_tokens,
            BLOCKS=self._padded_blocks,
            TILE=TILE,
            SHIFT=self._shift,
            PENALTIES=penalties,
            PDL=self._pdl,
            num_warps=TILE_WARPS,
            launch_pdl=self._pdl,
        )

    def _collect(self, params: Tensor, rows: int) -> None:
        """Collect the tokens with the highest weights in each row that has a filter.

        Their ids are written to `_ids`, their weights to the start of the row in `_weights`.
        """
        triton_sampling.collect[(rows, self._splits)](
            params,
            self._weights,
            self._ids,
            self._candidate_counts,
            self._histograms,
            self._vocab,
            self._row_stride,
            self._split_tokens,
            TILE=TILE,
            PDL=self._pdl,
            num_warps=TILE_WARPS,
            launch_pdl=self._pdl,
        )

    def _choose(self, params: Tensor, out: Tensor, seen: Tensor, blocks: int, *, penalties: bool) -> None:
        """Choose one token per row: the most likely one in greedy rows, else the one that the random number selects."""
        triton_choice.choose[(len(out),)](
            params,
            self._best,
            self._weights,
            self._ids,
            self._candidate_counts,
            self._masses,
            seen,
            out,
            self._vocab,
            blocks,
            self._row_stride,
            self._split_tokens,
            BLOCKS=self._padded_blocks,
            TILE=CHOICE_TILE,
            SHIFT=self._shift,
            PENALTIES=penalties,
            PDL=self._pdl,
            num_warps=CHOICE_WARPS,
            launch_pdl=self._pdl,
        )
