"""The work of an engine step: its tokens, rows and attention pairs, from which its duration is predicted."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StepWork:
    """The numbers of tokens, rows and attention pairs of one step."""

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    """Attention pairs of the prompt tokens: the tokens that each of them attends to, itself included, summed up."""
    decode_rows: int = 0
    decode_context_tokens: int = 0
    """Number of tokens that the decode rows attend to, summed over the rows."""
    draft_rows: int = 0
    """Number of decode rows that verify draft tokens; each request has one further row."""

    def with_chunk(self, tokens: int, context: int) -> "StepWork":
        """Return this work plus a prefill chunk of `tokens` tokens that follow `context` tokens of the same prompt."""
        pairs = self.prefill_pairs + chunk_pairs(tokens, context)
        return replace(self, prefill_tokens=self.prefill_tokens + tokens, prefill_pairs=pairs)

    def with_drafts(self, rows: int, context_tokens: int) -> "StepWork":
        """Return this work plus `rows` rows that verify draft tokens and attend to `context_tokens` tokens in total."""
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
