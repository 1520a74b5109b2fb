"""Predicts the duration of an engine step from its work.

    seconds = base + prompt_base (if it has prompt tokens)
            + token · prompt tokens beyond the free ones + pair · attention pairs of prompts
            + row · decode rows                          + context · tokens of decode context
            + verify_base (if rows verify draft tokens)

A step reads the weights once. Up to the roofline's knee, the arithmetic of its tokens takes no longer than this
reading: these tokens are free. If steps are padded to tiles, whole tiles are charged, and the attention of prompts is
charged for at least a wave of tokens (`tandem/cost_model/step_grid.py`). The coefficients are fitted in microseconds
(`tandem/cost_model/step_fit.py`, docs/decisions/cost_model.md).
"""

import sys
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tandem.cost_model.step_grid import FEWEST_SLOTS, FINE_TILES, MOST_TILES
from tandem.cost_model.step_work import StepWork
from tandem.protocol.cost_parameters import UNMEASURED, CostParameters

__all__ = ["CostParameters", "StepCost"]

Amount = TypeVar("Amount", float, NDArray[np.float64])


def slots_of(rows: int) -> int:
    """Return the number of batch slots for `rows` decode rows in a step with prompts; 0 without rows.

    It is a power of two of at least `FEWEST_SLOTS`.
    """
    return max(FEWEST_SLOTS, 1 << (rows - 1).bit_length()) if rows else 0


def padded_prompts(tokens: int, rows: int, tile: int) -> int:
    """Return the number of prompt tokens that a step computes after padding to tiles of `tile` tokens.

    The step has `tokens` prompt tokens and `rows` decode rows.
    """
    if tile <= 1:
        return tokens
    slots = slots_of(rows)
    tiles = -(-(tokens + slots) // tile)
    return (tiles + _not_captured(tiles)) * tile - slots


def unpadded_prompts(tokens: int, rows: int, tile: int) -> int:
    """Return the largest number of prompt tokens, at most `tokens`, with which a step needs no padding.

    The step also has `rows` decode rows. Returns `tokens` if they do not fill a tile.
    """
    if tile <= 1:
        return tokens
    slots = slots_of(rows)
    tiles = (tokens + slots) // tile
    whole = (tiles - _not_captured(tiles)) * tile - slots
    return whole if whole > 0 else tokens


def _not_captured(tiles: int) -> bool:
    """Return True if no CUDA graph has this number of tiles although graphs have one tile fewer and one more."""
    return FINE_TILES < tiles < MOST_TILES and tiles % 2 == 1


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicts durations in seconds from the cost parameters of this worker or of another worker."""

    parameters: CostParameters = UNMEASURED

    @property
    def margin(self) -> float:
        """The factor by which the worker's ITL targets are divided when steps are planned (`LearnedMargin`)."""
        return self.parameters.mixed_step_margin

    def seconds(self, work: StepWork) -> float:
        """Return the duration of a step with this work in seconds; 0 for an empty step."""
        rows, context, tokens = work.decode_rows, work.decode_context_tokens, work.prefill_tokens
        verifying_s = self.parameters.verify_base_s if work.draft_rows else 0.0
        if not tokens:
            return self.decode_step_seconds(rows, context) + verifying_s
        return self.rows_seconds(rows, context) + self.prompts_seconds(tokens, work.prefill_pairs, rows) + verifying_s

    def rows_seconds(self, rows: float, context_tokens: Amount) -> Amount:
        """Return the part of a step's duration that does not depend on its prompt tokens, in seconds.

        `context_tokens` is the total over the rows. An array of totals, one for each step, gives an array of durations.
        """
        p = self.parameters
        return p.base_s + p.row_s * rows + p.context_s * context_tokens

    def row_seconds(self, context_tokens: float) -> float:
        """Return the seconds that one more decode row with a context of `context_tokens` tokens adds to a step."""
        return self.parameters.row_s + self.parameters.context_s * context_tokens

    @property
    def idle_step_s(self) -> float:
        """The duration of a decode step of one request without context, in seconds."""
        return self.rows_seconds(1, 0)

    def prompts_seconds(self, tokens: int, pairs: float, rows: int) -> float:
        """Return the seconds that prompt tokens with `pairs` attention pairs add to a step with `rows` decode rows."""
        p = self.parameters
        return p.prompt_base_s + p.token_s * self.charged(tokens, rows) + p.pair_s * self.charged_pairs(tokens, pairs)

    def decode_step_seconds(self, rows: int, context_tokens: int) -> float:
        """Return the duration in seconds of a step of `rows` decode rows only; 0 without rows.

        The rows attend to `context_tokens` tokens in total, and none of them verifies a draft.
        """
        return self.rows_seconds(rows, context_tokens) if rows else 0.0

    def rows_within(self, target_s: float, row_context: float) -> float:
        """Return the number of decode rows that fit into a step of `target_s` seconds; fractional, at least 0.

        Each row attends to `row_context` tokens.
        """
        return max(0.0, target_s - self.parameters.base_s) / max(self.row_seconds(row_context), sys.float_info.epsilon)

    def charged(self, tokens: int, rows: int) -> int:
        """Return the number of prompt tokens of a step that cost `token_s` each: padded tokens beyond the free ones."""
        if not tokens:
            return 0
        padded = padded_prompts(tokens, rows, self.parameters.tile_tokens)
        return padded - max(0, min(padded, self.parameters.free_tokens - rows))

    def charged_pairs(self, tokens: int, pairs: float) -> float:
        """Return the number of attention pairs with which the cost of a step's prompt attention is computed.

        Fewer than `wave_tokens` tokens take as long as a full wave, so the number is `pairs · wave_tokens / tokens`.
        Otherwise it is `pairs`.
        """
        wave = self.parameters.wave_tokens
        return pairs * wave / tokens if 0 < tokens < wave else pairs

    def tokens_within(self, target_s: float, rows: int, context_tokens: int, pairs_per_token: float) -> int:
        """Return the maximum number of prompt tokens that fit into a step of `target_s` seconds beside decode rows.

        The step has `rows` decode rows, which attend to `context_tokens` tokens in total.
        """
        p = self.parameters
        spare_s = target_s - self.rows_seconds(rows, context_tokens) - p.prompt_base_s
        if spare_s <= 0.0:
            return 0
        each_s, wave = p.pair_s * pairs_per_token, p.wave_tokens
        most = self._tokens_in(spare_s, rows, each_s)
        if most >= wave or wave <= 1:
            return most
        spare_s -= wave * each_s  # the attention of fewer tokens takes as long as a wave's
        if spare_s <= 0.0:
            return 0
        return min(self._tokens_in(spare_s, rows, 0.0), unpadded_prompts(wave, rows, p.tile_tokens))

    def _tokens_in(self, spare_s: float, rows: int, each_s: float) -> int:
        """Return the maximum number of prompt tokens that fit into `spare_s` > 0 seconds.

        The attention of each token takes `each_s` seconds.
        """
        p, least_s = self.parameters, sys.float_info.epsilon
        free = max(0, p.free_tokens - rows)
        if spare_s <= free * each_s:
            most = int(spare_s / each_s)
        else:
            most = int((spare_s + free * p.token_s) / max(each_s + p.token_s, least_s))
        if p.tile_tokens <= 1:
            return most
        most = unpadded_prompts(most, rows, p.tile_tokens)
        left_s = spare_s - p.token_s * self.charged(most, rows)
        return max(0, min(most, int(left_s / max(each_s, least_s))))

    def prefill_seconds(
        self, tokens: int, pairs: float, chunk: int, *, rows: int = 0, context_tokens: int = 0, pause: int = 0
    ) -> tuple[float, int]:
        """Return the seconds to compute `tokens` > 0 prompt tokens in chunks, and the number of chunks.

        The prompt tokens have `pairs` attention pairs. A chunk has up to `chunk` tokens, and its step also has `rows`
        decode rows with `context_tokens` tokens of context in total. `pause` steps without prompt tokens follow each
        chunk. The steps compute at most this number of tokens in total:

            chunks · (rows + chunk) + pause · chunks · rows
        """
        pairs_per_token = pairs / tokens
        full, rest = divmod(tokens, chunk)
        steps = full + (rest > 0)
        seconds = steps * (1 + pause) * self.rows_seconds(rows, context_tokens)
        if full:
            seconds += full * self.prompts_seconds(chunk, chunk * pairs_per_token, rows)
        if rest:
            seconds += self.prompts_seconds(rest, rest * pairs_per_token, rows)
        return seconds, steps
