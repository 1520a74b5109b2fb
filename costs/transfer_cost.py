"""How long the KV pages of a prompt take from one worker to another: a latency, and bytes at a bandwidth.

Whoever sees transfers end, a router for instance, keeps one fit for each path and shows it every `TransferStats`.
"""

from wire.tracing.timeline import TransferStats

FORGET = 0.05
"""Part of what is known that is forgotten with each transfer."""
OUTLIER = 4.0
"""Times what was predicted, beyond which a transfer counts no more than that: it waited for something else."""
_GUESS_INFORMATION = 0.05
"""How much the first guess counts, in transfers."""
_NANOS = 1e9


class TransferCost:
    """Predicts and learns; not thread-safe. Least squares of relative errors over what was seen of late."""

    def __init__(self, latency_s: float = 2e-3, bytes_per_s: float = 1e10) -> None:
        """Begins with a guess, which must be above 0."""
        self._latency = latency_s
        self._per_byte = 1.0 / bytes_per_s
        # Sums over transfers of weight · (1, bytes, bytes², seconds, bytes · seconds), the weights 1 / seconds².
        self._sums = [0.0] * 5
        for size in (0.0, latency_s * bytes_per_s):
            self._add(size, latency_s + size / bytes_per_s, _GUESS_INFORMATION)
        self.error = 0.0
        """Recent mean of |predicted - actual| ÷ actual."""
        self.observed = 0

    def seconds(self, size: int) -> float:
        """Predicted, of `size` bytes; nothing moves in no time."""
        return self._latency + size * self._per_byte if size else 0.0

    def observe(self, transfer: TransferStats) -> None:
        """One more has ended. One that moved nothing, or took no time, tells nothing."""
        seconds = transfer.duration_nanos / _NANOS
        if transfer.bytes <= 0 or seconds <= 0.0:
            return
        predicted = self.seconds(transfer.bytes)
        self.observed += 1
        part = max(FORGET, 1 / self.observed)
        self.error += part * (abs(predicted - seconds) / seconds - self.error)
        self._sums = [each * (1 - FORGET) for each in self._sums]
        self._add(transfer.bytes, min(seconds, OUTLIER * predicted), 1.0)
        self._solve()

    def _add(self, size: float, seconds: float, count: float) -> None:
        weight = count / seconds**2
        for i, value in enumerate((1.0, size, size * size, seconds, size * seconds)):
            self._sums[i] += weight * value

    def _solve(self) -> None:
        """Least squares, both >= 0. Where all transfers are of one size, the line through what is known already."""
        n, b, bb, s, bs = self._sums
        spread = n * bb - b * b
        if spread <= 1e-9 * n * bb:
            scale = s / (n * self._latency + b * self._per_byte)
            self._latency, self._per_byte = self._latency * scale, self._per_byte * scale
            return
        per_byte = (n * bs - b * s) / spread
        latency = (s - per_byte * b) / n
        if per_byte < 0.0:
            per_byte, latency = 0.0, s / n
        elif latency < 0.0:
            latency, per_byte = 0.0, bs / bb
        self._latency, self._per_byte = latency, per_byte
