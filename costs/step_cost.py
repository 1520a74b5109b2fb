"""How long one engine step takes, predicted from what is in it.

A step reads the weights once, whatever it computes; beside that every part of it costs its share:

    seconds = base + prompt_base (if it has prompt tokens)
            + token · prompt tokens beyond the free ones + pair · attention pairs of prompts
            + row · decode rows                          + context · tokens of decode context

Prompts attend as if they had a whole wave of tokens at least (`costs/step_grid.py`). The free tokens are the knee of
the roofline: as long as a step has fewer tokens than the device can multiply while it reads the weights, a token more
costs nothing. Where steps fill tiles, whole tiles are charged.
Piecewise linear: fitted in microseconds (`costs/step_fit.py`), and solved for the number of tokens that
fit into a given time.
"""

from dataclasses import dataclass

from costs.step_grid import padded_prompts, unpadded_prompts
from wire.cost_parameters import UNMEASURED, CostParameters

__all__ = ["NOTHING", "CostParameters", "StepCost", "StepWork"]

_CHUNK_TOKENS = 2048
_TOKEN_MIN_S = 1e-9
_DELIVERY = 0.05
"""The part of a gap between tokens that its delivery to the client adds, at the 99th percentile."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """What is in a step. All are counts."""

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    """Over the chunks of prompts: tokens x mean context of a token of the chunk, itself included."""
    decode_rows: int = 0
    decode_context_tokens: int = 0
    """Over the decode rows: tokens they attend to."""

    def with_chunk(self, tokens: int, context: int) -> "StepWork":
        """And a chunk of `tokens` behind `context` tokens of its prompt."""
        return StepWork(
            self.prefill_tokens + tokens,
            self.prefill_pairs + chunk_pairs(tokens, context),
            self.decode_rows,
            self.decode_context_tokens,
        )


NOTHING = StepWork()


def chunk_pairs(tokens: int, context: int) -> float:
    """Attention pairs of `tokens` prompt tokens behind `context` others: each sees all before it, and itself."""
    return tokens * (context + (tokens + 1) / 2)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicts seconds from parameters, of this worker or of another."""

    parameters: CostParameters = UNMEASURED

    @property
    def margin(self) -> float:
        """The time between two tokens at a client / the predicted step, at the 99th percentile: what the worker has
        observed of its steps, and the delivery. A step that must keep a target is planned so much shorter.
        """
        return self.parameters.mixed_noise + _DELIVERY

    def seconds(self, work: StepWork) -> float:
        """Of one step, >= 0; 0 for a step with nothing in it."""
        if not work.prefill_tokens:
            return self.decode_step_seconds(work.decode_rows, work.decode_context_tokens)
        return self.mixed_step_seconds(
            work.prefill_tokens, work.prefill_pairs, work.decode_rows, work.decode_context_tokens
        )

    def mixed_step_seconds(self, tokens: int, pairs: float, rows: int, context_tokens: int) -> float:
        """Of one step with prompt tokens, their attention pairs, and decode rows that attend to `context_tokens`."""
        return self.rows_seconds(rows, context_tokens) + self.prompts_seconds(tokens, pairs, rows)

    def rows_seconds(self, rows: int, context_tokens: int) -> float:
        """The part of a step that its decode rows take, if any: what it takes at least."""
        p = self.parameters
        return p.base_s + p.row_s * rows + p.context_s * context_tokens

    def prompts_seconds(self, tokens: int, pairs: float, rows: int) -> float:
        """And the part of its prompt tokens beside `rows` decode rows."""
        p = self.parameters
        return p.prompt_base_s + p.token_s * self.charged(tokens, rows) + p.pair_s * self.charged_pairs(tokens, pairs)

    def decode_step_seconds(self, rows: int, context_tokens: int) -> float:
        """Of one step of `rows` decode rows that attend to `context_tokens` in all; 0 without rows."""
        p = self.parameters
        return p.base_s + p.row_s * rows + p.context_s * context_tokens if rows else 0.0

    def charged(self, tokens: int, rows: int) -> int:
        """Those of a step's prompt tokens, beside so many decode rows, that cost `token_s` each."""
        p = self.parameters
        if not tokens:
            return 0
        padded = padded_prompts(tokens, rows, p.tile_tokens) if p.tile_tokens > 1 else tokens
        free = p.free_tokens - rows
        if free <= 0:
            return padded
        return padded - free if padded > free else 0

    def charged_pairs(self, tokens: int, pairs: float) -> float:
        """The attention pairs of so many prompt tokens in one step, as many as take `pair_s` each."""
        wave = self.parameters.wave_tokens
        return pairs * wave / tokens if 0 < tokens < wave else pairs

    def tokens_within(self, target_s: float, rows: int, context_tokens: int, pairs_per_token: float) -> int:
        """Most prompt tokens, each with so many attention pairs, beside `rows` decode rows in a step of `target_s`."""
        p = self.parameters
        decoding_s = p.base_s + p.row_s * rows + p.context_s * context_tokens
        spare_s = target_s - decoding_s - p.prompt_base_s
        if spare_s <= 0.0:
            return 0
        each_s, wave = p.pair_s * pairs_per_token, p.wave_tokens
        most = self._tokens_in(spare_s, rows, each_s)
        if most >= wave or wave <= 1:
            return most
        return self._tokens_beside(wave * each_s, spare_s, rows, wave)

    def _tokens_beside(self, attention_s: float, spare_s: float, rows: int, tokens: int) -> int:
        """Most of `tokens` prompt tokens beside `rows` decode rows in `spare_s`, if attention of all takes so long."""
        if spare_s <= attention_s:
            return 0
        fits = self._tokens_in(spare_s - attention_s, rows, 0.0)
        return min(fits, unpadded_prompts(tokens, rows, self.parameters.tile_tokens))

    def _tokens_in(self, spare_s: float, rows: int, each_s: float) -> int:
        """Most prompt tokens beside `rows` decode rows in `spare_s` > 0, with `each_s` of attention for each."""
        p = self.parameters
        free = max(0, p.free_tokens - rows)
        if spare_s <= free * each_s:
            most = int(spare_s / each_s)
        else:
            most = int((spare_s + free * p.token_s) / max(each_s + p.token_s, _TOKEN_MIN_S))
        if p.tile_tokens <= 1:
            return most
        most = unpadded_prompts(most, rows, p.tile_tokens)
        left_s = spare_s - p.token_s * self.charged(most, rows)
        return max(0, min(most, int(left_s / max(each_s, _TOKEN_MIN_S))))

    def prefill_seconds(
        self,
        uncached_tokens: int,
        context: int = 0,
        beside_decode: StepWork = NOTHING,
        chunk_tokens: int = _CHUNK_TOKENS,
    ) -> float:
        """Until a prompt's last `uncached_tokens`, behind `context` tokens whose KV is there, are computed in steps of
        at most `chunk_tokens` prompt tokens, with `beside_decode` in each of them: its decode rows' time is in it.
        """
        if uncached_tokens <= 0:
            return 0.0
        p = self.parameters
        chunk_tokens = max(1, chunk_tokens)
        full, rest = divmod(uncached_tokens, chunk_tokens)
        steps = full + (rest > 0)
        rows = beside_decode.decode_rows
        charged = full * self.charged(chunk_tokens, rows) + self.charged(rest, rows)
        pairs = chunk_pairs(uncached_tokens, context) / uncached_tokens
        pairs = full * self.charged_pairs(chunk_tokens, chunk_tokens * pairs) + self.charged_pairs(rest, rest * pairs)
        each = p.base_s + p.prompt_base_s + p.row_s * beside_decode.decode_rows
        each += p.context_s * beside_decode.decode_context_tokens
        return steps * each + p.token_s * charged + p.pair_s * pairs
