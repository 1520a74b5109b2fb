"""The placement of a request's prompt: where its KV came from, and what that was predicted to cost."""

from dataclasses import dataclass

TOKEN_SOURCES = ("resident", "reloaded", "computed")
"""The sources of the KV of a prompt's tokens: the device, tiers of the prefix cache, and the steps of the prompt."""


@dataclass(frozen=True, slots=True)
class PromptCost:
    """The predicted cost of a prompt on a worker: its tokens by the source of their KV, and the seconds of each part.

    Tiers are read while earlier prompts are computed, so the first token comes after

        max(wait_s, reload_s) + compute_s
    """

    resident_tokens: int = 0
    """Number of tokens whose KV is on the device."""
    reloaded_tokens: int = 0
    """Number of tokens whose KV is loaded from tiers of the prefix cache, or from the worker `source`."""
    computed_tokens: int = 0
    wait_s: float = 0.0
    """Seconds of the prompts that are computed before."""
    reload_s: float = 0.0
    """Seconds until the KV is loaded, with the reloads before it."""
    compute_s: float = 0.0
    """Seconds of the steps that compute the prompt."""
    source: str = ""
    """Id of the worker from which the KV is pulled; empty = it is loaded from tiers, if any."""

    @property
    def ttft_s(self) -> float:
        """The seconds from the placement until the first token."""
        return max(self.wait_s, self.reload_s) + self.compute_s


@dataclass(frozen=True, slots=True)
class PlacementStats:
    """The sources of a prompt's KV on the worker that computed the prompt, with the predicted and the actual cost."""

    resident_tokens: int
    reloaded_tokens: int
    computed_tokens: int
    predicted: PromptCost
    ttft_s: float
    """The seconds from the placement until the first token reached the router."""
    regret_s: float
    """The seconds by which the placement turned out worse than the predicted cost of the second best one."""

    @property
    def tokens_by_source(self) -> dict[str, int]:
        """The number of tokens from each of `TOKEN_SOURCES`."""
        counts = self.resident_tokens, self.reloaded_tokens, self.computed_tokens
        return dict(zip(TOKEN_SOURCES, counts, strict=True))
