"""What policies know of a request that waits: no text, no streams, no clients."""

from dataclasses import dataclass

from router.placement import Need
from router.slo import BEST_EFFORT, SloClass


@dataclass(slots=True, eq=False)
class Ticket:
    """A request's place in the queue. Seconds are those of the router's clock; tokens are counts."""

    wire_id: str
    """Its name, used once."""
    sequence: int
    """Order of arrival."""
    arrived_s: float
    prompt_tokens: int
    max_tokens: int
    """Of the answer."""
    to_the_limit: bool = False
    """Whether nothing but `max_tokens` ends it, as far as anybody knows."""
    digests: tuple[bytes, ...] = ()
    """Names of the prompt's full pages."""
    tenant: str = ""
    """On whose account it goes."""
    priority: int = 0
    """Larger goes first, among those of its tenant."""
    slo: SloClass = BEST_EFFORT
    """What it is served under; the class that was asked for, or best effort if that could not be held."""
    answered: int = 0
    """Tokens of the answer that are prefilled with the prompt, as an earlier attempt has generated them."""
    resumed: bool = False
    """Whether its client reads already: it goes before all that have not begun."""
    expected_tokens: int | None = None
    """Of the answer, by those that have ended; None = as many as it may have."""
    start_by_s: float = 0.0
    """When its prompt must be started to meet the target; orders the queue, and stays as it is while it waits there."""
    service_s: float = 0.0
    """Seconds that its prompt takes to compute, by prediction."""
    charged: int = 0
    """Tokens of its prompt that its tenant was charged for."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens this attempt prefills."""
        return self.prompt_tokens + self.answered

    @property
    def decodes(self) -> bool:
        """Whether tokens follow the one that prefill generates."""
        return self.max_tokens > self.answered + 1

    def need(self, now: float) -> Need:
        """What placement needs to know."""
        expected = None
        if self.expected_tokens is not None:
            expected = max(self.prefill_tokens, self.prompt_tokens + self.expected_tokens - 1)
        return Need(
            prompt_tokens=self.prefill_tokens,
            kv_tokens=self.prompt_tokens + self.max_tokens - 1,
            expected_kv_tokens=expected,
            decodes=self.decodes,
            digests=self.digests,
            slo=self.slo,
            waited_s=now - self.arrived_s,
        )
