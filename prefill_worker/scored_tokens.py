"""Limits the scored prompt tokens of a step by the time that they take on this device.

The log probabilities of a prompt take as long as its forward pass on a GPU and many times as long on a CPU, where a
whole step of scored tokens takes half a minute. Until it ends nobody else has a token, and an abort has no effect.
"""

STEP_S = 0.2
"""The time in seconds above which a step's scored tokens become fewer; below half of it they become more."""
_FIRST, _LEAST = 64, 16
"""The scored tokens of the first step, and the fewest: the weights are read for them all at once."""


class ScoredTokens:
    """The most scored tokens of a step; they are halved or doubled after each step that scored. Not thread-safe."""

    def __init__(self) -> None:
        self.most = _FIRST

    def observe(self, tokens: int, seconds: float) -> None:
        """Learn from a step with `tokens` scored tokens that took `seconds` in all."""
        if seconds > STEP_S:
            self.most = max(_LEAST, min(self.most, tokens) // 2)
        elif tokens >= self.most and seconds < STEP_S / 2:
            self.most *= 2
