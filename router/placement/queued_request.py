"""What scheduling knows of a request: sizes and targets, no text, no streams, no clients."""

from dataclasses import dataclass

from router.slo import BEST_EFFORT, SloClass


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request that waits for workers. Seconds are those of the router's clock; tokens are counts."""

    wire_id: str
    """Its name among workers, used once."""
    sequence: int
    """Order of arrival."""
    arrived_s: float
    prompt_tokens: int
    """As the client sent it."""
    max_tokens: int
    """Of the answer."""
    to_the_limit: bool = False
    """Whether nothing but `max_tokens` ends the answer, as far as is known."""
    digests: tuple[bytes, ...] = ()
    """Names of the prompt's full pages (`wire.page_digests`); () = unknown."""
    tenant: str = ""
    """Whose share of the work it counts against."""
    priority: int = 0
    """Lower goes first, among those of its tenant."""
    slo: SloClass = BEST_EFFORT
    """What it is served under: the class that was asked for, or best effort if that could not be held."""
    answered: int = 0
    """Tokens of the answer that an earlier attempt generated; they are prefilled behind the prompt."""
    resumed: bool = False
    """Whether its client reads already: it goes before all that have not begun."""
    expected_tokens: int | None = None
    """Of the answer, rarely exceeded by those that have ended; None = as many as it may have."""
    mean_tokens: float = 0.0
    """Of the answer, on average by those that have ended."""
    start_by_s: float = 0.0
    """When its prompt must be started to meet the target; orders the queue, and stays as it is while it waits there."""
    service_s: float = 0.0
    """Predicted seconds to compute its prompt."""
    charged: int = 0
    """Tokens of its prompt that its tenant was charged for."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens that this attempt prefills."""
        return self.prompt_tokens + self.answered

    @property
    def decodes(self) -> bool:
        """Whether tokens follow the one that prefill generates."""
        return self.max_tokens > self.answered + 1

    @property
    def kv_tokens(self) -> int:
        """The most KV that it ever stores, in tokens."""
        return self.prompt_tokens + self.max_tokens - 1

    @property
    def reserved_tokens(self) -> int:
        """The KV that a decode worker must have free when it begins: that of the expected answer."""
        if self.expected_tokens is None:
            return self.kv_tokens
        return max(self.prefill_tokens, self.prompt_tokens + self.expected_tokens - 1)

    @property
    def decode_context(self) -> int:
        """Tokens that its answer attends to, on average while it lasts."""
        return self.prefill_tokens + int(self.mean_tokens) // 2
