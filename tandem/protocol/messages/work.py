"""The work that a router sends: a reservation to the decode worker, then a task to the prefill worker."""

import math
from dataclasses import dataclass, field

from tandem.protocol.messages.leases import Lease
from tandem.protocol.messages.references import PeerRef, RequestRef
from tandem.protocol.messages.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A worker that has cached more of a prompt than the worker that computes it: the first `tokens` tokens.

    `address` is that of its gRPC server.
    """

    peer: PeerRef
    address: str
    tokens: int


@dataclass(frozen=True, slots=True)
class _Continued:
    """An attempt to compute an answer; earlier attempts may have generated its first tokens.

    The last `prior_output_tokens` of `prompt_token_ids` are answer tokens that earlier attempts have generated.
    """

    router_id: str
    ref: RequestRef
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    prior_output_tokens: int = field(default=0, kw_only=True)
    cache_salt: str = field(default="", kw_only=True)
    adapter: str = field(default="", kw_only=True)
    """The hash of the request's adapter; "" = the base model. Different adapters have different cache salts."""
    source: PrefixSource | None = field(default=None, kw_only=True)
    """The worker from which the first pages of the prompt are pulled; None if the receiver computes no part of it."""
    tenant: str = field(default="", kw_only=True)
    retention_s: float = field(default=0.0, kw_only=True)
    """Seconds for which the prompt's pages are kept in preference to others of the tenant after the request."""
    hinted_s: float = field(default=0.0, kw_only=True)
    """Seconds for which the pages of the first `hinted_tokens` tokens are kept, if that is longer."""
    hinted_tokens: int = field(default=0, kw_only=True)

    @property
    def scores_prompt(self) -> bool:
        """True if the attempt returns log probabilities of the prompt and therefore computes the whole prompt.

        Only a first attempt does so.
        """
        return self.sampling.prompt_logprobs is not None and not self.prior_output_tokens

    @property
    def original_prompt_tokens(self) -> int:
        """Number of tokens of the client's prompt."""
        return len(self.prompt_token_ids) - self.prior_output_tokens

    @property
    def original_prompt(self) -> tuple[int, ...]:
        """The token ids of the client's prompt."""
        return self.prompt_token_ids[: self.original_prompt_tokens]

    @property
    def answer(self) -> tuple[int, ...]:
        """The token ids of the answer that earlier attempts have generated; empty for a first attempt."""
        return self.prompt_token_ids[self.original_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class Reservation(_Continued):
    """A request of a router to a decode worker: reserve pages for this prompt and its answer.

    Only the worker `prefill` may write to the pages. `gap_target_s` is the answer's target for the maximum inter-token
    gap on this worker in seconds; infinite = no target.
    """

    prefill: PeerRef
    gap_target_s: float = field(default=math.inf, kw_only=True)


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of a prompt's KV: a decode worker, its gRPC address and its lease."""

    peer: PeerRef
    address: str
    lease: Lease


@dataclass(frozen=True, slots=True)
class PrefillTask(_Continued):
    """A request of a router to a prefill worker: compute the KV of this prompt and sample the next token.

    Without a destination, the sampled token is the last one of the answer. `waited_s` is the time in seconds that the
    request waited in the router's queue before this attempt.
    """

    destination: Destination | None
    waited_s: float = field(default=0.0, kw_only=True)


@dataclass(frozen=True, slots=True)
class PrefixPull:
    """A request to another worker to send the pages of a prefix, of which the caller has the first `held` digests.

    The caller computes the tokens itself if the pages have not arrived after `within_s` seconds.
    """

    destination: Destination
    digests: tuple[bytes, ...]
    held: int
    within_s: float
