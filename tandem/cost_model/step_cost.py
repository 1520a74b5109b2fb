"""Predicts the duration of an engine step from its work.

    seconds = base + prompt_base (if it has prompt tokens)
            + token · prompt tokens beyond the free ones + pair · attention pairs of prompts
            + row · decode rows                          + context · tokens of decode context
            + verify_base (if rows verify drafts)

A step reads the weights once. The free tokens are the knee of the roofline: up to it another token costs nothing. Where
steps are padded to tiles, whole tiles are charged, and the attention of prompts is charged for at least a wave of
tokens (`tandem/cost_model/step_grid.py`). The coefficients are fitted in microseconds (`tandem/cost_model/step_fit.py`,
docs/decisions/cost_model.md).
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
    """Return the batch slots that `rows` decode rows take in a step with prompts."""
    return max(FEWEST_SLOTS, 1 << (rows - 1).bit_length()) if rows else 0


def padded_prompts(tokens: int, rows: int, tile: int) -> int:
    """Return the number of prompt tokens after padding a step of `tokens` tokens and `rows` decode rows to tiles."""
    if tile <= 1:
        return tokens
    slots = slots_of(rows)
    tiles = -(-(tokens + slots) // tile)
    return (tiles + _not_captured(tiles)) * tile - slots


def unpadded_prompts(tokens: int, rows: int, tile: int) -> int:
    """Return the largest part of `tokens` that needs no padding with `rows` decode rows; all if no tile is filled."""
    if tile <= 1:
        return tokens
    slots = slots_of(rows)
    tiles = (tokens + slots) // tile
    whole = (tiles - _not_captured(tiles)) * tile - slots
    return whole if whole > 0 else tokens


def _not_captured(tiles: int) -> bool:
    """Return True if only steps of one tile fewer and of one more are captured."""
    return FINE_TILES < tiles < MOST_TILES and tiles % 2 == 1


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicts seconds from the cost parameters of this worker or of another one."""

    parameters: CostParameters = UNMEASURED

    @property
    def margin(self) -> float:
        """The learned margin of the worker's mixed steps, by which the ITL targets of steps are divided."""
        return self.parameters.mixed_noise

    def seconds(self, work: StepWork) -> float:
        """Return the duration of one step; 0 for an empty step."""
        rows, context, tokens = work.decode_rows, work.decode_context_tokens, work.prefill_tokens
        verifying_s = self.parameters.verify_base_s if work.draft_rows else 0.0
        if not tokens:
            return self.decode_step_seconds(rows, context) + verifying_s
        return self.rows_seconds(rows, context) + self.prompts_seconds(tokens, work.prefill_pairs, rows) + verifying_s

    def rows_seconds(self, rows: float, context_tokens: Amount) -> Amount:
        """Return the part of a step's duration that does not depend on its prompt tokens.

        An array of contexts, one for each step, gives an array of durations.
        """
        p = self.parameters
        return p.base_s + p.row_s * rows + p.context_s * context_tokens

    def row_seconds(self, context_tokens: float) -> float:
        """Return the seconds that one more decode row adds, which attends to `context_tokens` tokens."""
        return self.parameters.row_s + self.parameters.context_s * context_tokens

    @property
    def idle_step_s(self) -> float:
        """The seconds of a decode step of one request with little context."""
        return self.rows_seconds(1, 0)

    def prompts_seconds(self, tokens: int, pairs: float, rows: int) -> float:
        """Return the seconds that prompt tokens add to a step with `rows` decode rows."""
        p = self.parameters
        return p.prompt_base_s + p.token_s * self.charged(tokens, rows) + p.pair_s * self.charged_pairs(tokens, pairs)

    def decode_step_seconds(self, rows: int, context_tokens: int) -> float:
        """Return the duration of a step of decode rows that attend to `context_tokens` in total; 0 without rows.

        None of the rows verifies a draft.
        """
        return self.rows_seconds(rows, context_tokens) if rows else 0.0

    def rows_within(self, target_s: float, row_context: float) -> float:
        """Return how many decode rows of `row_context` tokens each a step of `target_s` seconds has; at least 0."""
        return max(0.0, target_s - self.parameters.base_s) / max(self.row_seconds(row_context), sys.float_info.epsilon)

    def charged(self, tokens: int, rows: int) -> int:
        """Return how many of a step's prompt tokens cost `token_s` each: all padded ones beyond the free ones."""
        if not tokens:
            return 0
        padded = padded_prompts(tokens, rows, self.parameters.tile_tokens)
        return padded - max(0, min(padded, self.parameters.free_tokens - rows))

    def charged_pairs(self, tokens: int, pairs: float) -> float:
        """Return the attention pairs of a step's prompt tokens that cost `pair_s` each."""
        wave = self.parameters.wave_tokens
        return pairs * wave / tokens if 0 < tokens < wave else pairs

    def tokens_within(self, target_s: float, rows: int, context_tokens: int, pairs_per_token: float) -> int:
        """Return the most prompt tokens that a step of `target_s` seconds with these decode rows computes."""
        p = self.parameters
        spare_s = target_s - self.rows_seconds(rows, context_tokens) - p.prompt_base_s
        if spare_s <= 0.0:
            return 0
        each_s, wave = p.pair_s * pairs_per_token, p.wave_tokens
        most = self._tokens_in(spare_s, rows, each_s)
        if most >= wave or wave <= 1:
            return most
        spare_s -= wave * each_s  # fewer tokens attend as long as a wave does
        if spare_s <= 0.0:
            return 0
        return min(self._tokens_in(spare_s, rows, 0.0), unpadded_prompts(wave, rows, p.tile_tokens))

    def _tokens_in(self, spare_s: float, rows: int, each_s: float) -> int:
        """Return the most prompt tokens in `spare_s` > 0 seconds, with `each_s` seconds of attention for each."""
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

        A chunk has up to `chunk` tokens, and its step also has `rows` decode rows. `pause` steps without prompt tokens
        follow each chunk. In total, the steps compute

            chunks · (rows + chunk) + pause · chunks · rows
        """
        each = pairs / tokens
        full, rest = divmod(tokens, chunk)
        steps = full + (rest > 0)
        seconds = steps * (1 + pause) * self.rows_seconds(rows, context_tokens)
        if full:
            seconds += full * self.prompts_seconds(chunk, chunk * each, rows)
        if rest:
            seconds += self.prompts_seconds(rest, rest * each, rows)
        return seconds, steps
