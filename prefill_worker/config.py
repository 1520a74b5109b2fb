"""Settings of the prefill half."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """The limits of the prefill half."""

    max_requests: int = 1024
    """Most requests it knows at a time, waiting or not; routers bind late, so this is a backstop, not a queue."""
    max_rows: int = 64
    """Most chunks of one step."""
    quarantine_share_max: float = 0.5
    """Part of the pool that writes of prompts which are over may keep before no more prompts are taken."""
