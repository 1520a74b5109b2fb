"""What a router asks for: pages at a decode worker, then the prompt's KV from a prefill worker."""

import math
from dataclasses import dataclass, field

from wire.messages.leases import Lease
from wire.messages.references import PeerRef, RequestRef
from wire.messages.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class _Continued:
    """An attempt may go on behind the answer's first tokens, which an earlier one has generated: then the last
    `answered` of `prompt_token_ids` are these.
    """

    router_id: str
    ref: RequestRef
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    answered: int = field(default=0, kw_only=True)
    cache_salt: str = field(default="", kw_only=True)

    @property
    def question_tokens(self) -> int:
        """How long the client's own prompt is."""
        return len(self.prompt_token_ids) - self.answered

    @property
    def question(self) -> tuple[int, ...]:
        """The client's own prompt."""
        return self.prompt_token_ids[: self.question_tokens]

    @property
    def answer(self) -> tuple[int, ...]:
        """What earlier attempts have generated."""
        return self.prompt_token_ids[self.question_tokens :]


@dataclass(frozen=True, slots=True)
class Reservation(_Continued):
    """Router to decode: promise pages for this prompt and its answer; `prefill` alone may write them. Its service class
    bears gaps of `gap_target_s` seconds between tokens there, infinite = any.
    """

    prefill: PeerRef
    gap_target_s: float = field(default=math.inf, kw_only=True)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a prefilled request goes: a decode worker, its gRPC address and its lease."""

    peer: PeerRef
    address: str
    lease: Lease


@dataclass(frozen=True, slots=True)
class PrefillTask(_Continued):
    """Router to prefill: build this prompt's KV and sample the next token. No destination: the next is the last."""

    destination: Destination | None
