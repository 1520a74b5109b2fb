"""The rate limit for answer chunks: a token bucket of chunks per second with a small burst.

Sending a chunk costs CPU time, which an engine on the same machine may need.
"""

import math

from tandem.cost_model.chunks import breaks_target


def must_not_wait(target_s: float, predicted_s: float, step_s: float, delay_max_s: float) -> bool:
    """Return True if a delay of `delay_max_s` would miss an ITL target that placement predicted to be met.

    `predicted_s` is the step time predicted at placement, `step_s` the current step time; the delay is added to the
    longer one. All are in seconds.
    """
    return breaks_target(target_s, predicted_s, max(predicted_s, step_s) + delay_max_s)


class ChunkBudget:
    """A token bucket that limits the chunks per second of all answers together.

    The `EventStream` owns it, on the event loop. While the chunks to send are within the budget, no chunk waits. Above
    the budget, tokens wait and are batched with later tokens of their request.
    """

    def __init__(self, chunks_per_s: float, delay_max_s: float) -> None:
        """`delay_max_s` is the maximum wait, and also the time for which unspent budget accumulates, in seconds."""
        self._per_s, self.delay_max_s = chunks_per_s, delay_max_s
        self._saved, self._at = 0.0, -math.inf

    def wait_s(self, now: float, chunks: int) -> float:
        """Return how long `chunks` chunks that are ready at `now` must wait, at most `delay_max_s`, in seconds."""
        return min(max(0.0, (chunks - self._saved_by(now)) / self._per_s), self.delay_max_s)

    def spend(self, now: float, chunks: int) -> None:
        """Record that `chunks` chunks are sent at `now`."""
        self._saved, self._at = max(0.0, self._saved_by(now) - chunks), now

    def _saved_by(self, now: float) -> float:
        return min(self._saved + (now - self._at) * self._per_s, self.delay_max_s * self._per_s)
