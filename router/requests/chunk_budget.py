"""How often answers may be sent: a budget of chunks a second, of which a little can be saved up."""

import math


def must_not_wait(target_s: float, predicted_s: float, step_s: float, delay_max_s: float) -> bool:
    """Whether tokens must be sent at once for the gap target of their class to be kept: it was kept by the predicted
    step, and would be missed by the step as it is now and the longest delay. All in seconds.
    """
    return predicted_s < target_s < max(predicted_s, step_s) + delay_max_s


class ChunkBudget:
    """A token bucket. As long as fewer chunks are due than may be sent, none waits, whichever worker its tokens come
    from; with more of them, tokens wait for others to travel with.
    """

    def __init__(self, chunks_per_s: float, delay_max_s: float) -> None:
        """`delay_max_s` is the longest wait, and for how long what is not spent is saved."""
        self._per_s, self.delay_max_s = chunks_per_s, delay_max_s
        self._saved, self._at = 0.0, -math.inf

    def wait_s(self, now: float, chunks: int) -> float:
        """For how many seconds so many chunks that are due `now` have to wait."""
        return min(max(0.0, (chunks - self._saved_by(now)) / self._per_s), self.delay_max_s)

    def spend(self, now: float, chunks: int) -> None:
        """So many are sent now."""
        self._saved, self._at = max(0.0, self._saved_by(now) - chunks), now

    def _saved_by(self, now: float) -> float:
        return min(self._saved + (now - self._at) * self._per_s, self.delay_max_s * self._per_s)
