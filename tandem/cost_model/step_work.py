"""The work of an engine step: its tokens, rows and attention pairs, from which its duration is predicted."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StepWork:
    """The counts of tokens, rows and attention pairs of one step."""

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    """Sum over the chunks of tokens x mean context of a token of the chunk, the token itself included."""
    decode_rows: int = 0
    decode_context_tokens: int = 0
    """Sum of the numbers of tokens that the decode rows attend to."""
    draft_rows: int = 0
    """The number of decode rows that verify draft tokens; the others are one for each request."""

    def with_chunk(self, tokens: int, context: int) -> "StepWork":
        """Return this work with another chunk of `tokens` tokens after `context` tokens of its prompt."""
        pairs = self.prefill_pairs + chunk_pairs(tokens, context)
        return replace(self, prefill_tokens=self.prefill_tokens + tokens, prefill_pairs=pairs)

    def with_drafts(self, rows: int, context_tokens: int) -> "StepWork":
        """Return this work with `rows` more rows that verify drafts and read the KV of `context_tokens` more tokens."""
        return replace(
            self,
            decode_rows=self.decode_rows + rows,
            decode_context_tokens=self.decode_context_tokens + context_tokens,
            draft_rows=self.draft_rows + rows,
        )


NOTHING = StepWork()


def chunk_pairs(tokens: int, context: int) -> float:
    """Return the attention pairs of `tokens` prompt tokens after `context` others; each attends to itself too."""
    return tokens * (context + (tokens + 1) / 2)
