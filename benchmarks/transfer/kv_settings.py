"""Sizes of `benchmarks.kv_transfer` on each kind of device."""

from dataclasses import dataclass

ANSWER_RESERVE = 16
"""Tokens of a model's context reserved for the answer."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes that depend on the device, in tokens; `streams` decode in the background."""

    page_tokens: int
    prompt: int
    chunk: int
    streams: int
    stream_tokens: int
    rounds: int
    dtype: str
    transfers: tuple[int, ...]
    """Tokens of transfers whose bandwidth is measured, in addition to one page and a chunk."""

    @property
    def prompt_name(self) -> int:
        """The prompt's length in names of figures, including the answer's reserve."""
        return self.prompt if self.prompt % self.page_tokens == 0 else self.prompt + ANSWER_RESERVE


SETTINGS = {
    "cuda": Settings(
        128,
        8192 - ANSWER_RESERVE,
        2048,
        streams=8,
        stream_tokens=600,
        rounds=12,
        dtype="bfloat16",
        transfers=(2048, 4096, 8192),
    ),
    "cpu": Settings(16, 1536, 512, streams=2, stream_tokens=60, rounds=4, dtype="float32", transfers=(2048,)),
}
