"""Limits the scored prompt tokens of a step by the time that they take on this device.

The log probabilities of a prompt take as long as its forward pass on a GPU, and many times as long on a CPU, where a
full step of scored tokens takes half a minute. Until such a step ends, no other request gets a token, and an abort has
no effect.
"""

STEP_S = 0.2
"""The step time in seconds above which the next step gets fewer scored tokens; below half of it, it gets more."""
_FIRST, _LEAST = 64, 16
"""The most scored tokens of the first step, and the lowest limit: the step reads the weights once for all of them."""


class ScoredTokens:
    """The most scored tokens of a step, halved or doubled by the time of each step that scored. Not thread-safe."""

    def __init__(self) -> None:
        self.most = _FIRST

    def observe(self, tokens: int, seconds: float) -> None:
        """Adapt the limit after a step with `tokens` scored tokens that took `seconds` in all."""
        if seconds > STEP_S:
            self.most = max(_LEAST, min(self.most, tokens) // 2)
        elif tokens >= self.most and seconds < STEP_S / 2:
            self.most *= 2
