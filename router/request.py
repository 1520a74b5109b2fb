"""A request inside the router: what was asked, what was admitted, and the one object that holds its state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from router.answer import Answer
from router.assembler import TokenAssembler
from router.chat_template import ChatTurn
from wire.messages import Lease, RequestRef, SamplingParams
from wire.timeline import EdgeStamp, TransferStats

if TYPE_CHECKING:
    from router.answer_text import AnswerText
    from router.worker_link import WorkerLink


@dataclass(frozen=True, slots=True)
class Options:
    """Generation options as a client gave them, unchecked; None = not given."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """OpenAI's newer name for `max_tokens`; counts where both are given."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    """Most likely tokens to report beside each chosen one; None = no log probabilities."""
    top_logprobs: int | None = None
    """The same under the name that OpenAI's chat gives it; counts where both are given."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    slo_class: str = ""
    cache_salt: str = ""
    """Cached KV is used again only between requests of the same salt."""

    @property
    def alternatives(self) -> int | None:
        """Most likely tokens to report beside each chosen one, whatever the field is called."""
        return self.logprobs if self.top_logprobs is None else self.top_logprobs

    @property
    def answer_limit(self) -> tuple[str, int | None]:
        """Most tokens of the answer, behind the name of the field that says so."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt in turns, for the chat template."""

    turns: tuple[ChatTurn, ...]


Prompt = str | tuple[int, ...] | Conversation
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What either door hands to admission, unchecked. An empty `request_id` lets the router make one."""

    request_id: str
    model: str
    prompt: Prompt
    options: Options
    received: EdgeStamp


@dataclass(frozen=True, slots=True)
class Admitted:
    """A checked request: token ids, complete sampling values, stop strings."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    priority: int
    edges: tuple[EdgeStamp, ...]
    cache_salt: str = ""

    @property
    def kv_tokens(self) -> int:
        """Most positions whose KV it ever stores: the last token of the answer is never fed."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens - 1


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """All the router knows of one request in flight. The dispatcher owns it; it is gone when the request ends."""

    wire_id: str
    """Its name among workers: never used twice, whatever ids clients choose."""
    admitted: Admitted
    sequence: int
    """Order of arrival."""
    text: AnswerText
    answer: Answer
    waiting_since: float
    """Monotonic seconds at which it entered the queue."""
    last_heard: float = 0.0
    """Monotonic seconds of the last sign of life from its workers, once placed."""
    attempt: int = 1
    answered: int = 0
    """Tokens of the answer that this attempt starts behind: they go to its workers with the prompt."""
    failures: int = 0
    prefill: WorkerLink | None = None
    decode: WorkerLink | None = None
    lease: Lease | None = None
    assembler: TokenAssembler = field(default_factory=TokenAssembler)
    edges: list[EdgeStamp] = field(default_factory=list)
    transfer: TransferStats | None = None
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed for the first token, as their KV was cached."""
    prefill_worker: str = ""
    decode_worker: str = ""
    generated: bool = False
    """Whether its workers have finished it and hold nothing of it."""
    ended: bool = False

    @property
    def ref(self) -> RequestRef:
        return RequestRef(self.wire_id, self.attempt)

    @property
    def prefill_tokens(self) -> int:
        """Tokens this attempt prefills: the prompt, and the answer as far as it goes on behind it."""
        return len(self.admitted.prompt_token_ids) + self.answered

    @property
    def token_ids(self) -> tuple[int, ...]:
        """These tokens."""
        return self.admitted.prompt_token_ids + self.assembler.first(self.answered)
