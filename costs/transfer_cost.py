"""Predicts the seconds that KV pages take from one worker to another: `latency + bytes · seconds per byte`."""

from wire.tracing.timeline import TransferStats

FORGET = 0.05
"""The share of earlier transfers' weight that is forgotten with each transfer, and the weight of the first guess."""
OUTLIER = 4.0
"""A transfer that takes longer than this many times its prediction counts as that: it waited for something else."""


class TransferCost:
    """Fits latency and bandwidth by weighted least squares of relative errors. Not thread-safe."""

    def __init__(self, latency_s: float = 2e-3, bytes_per_s: float = 1e10) -> None:
        """Begin with a guess; both must be above 0."""
        self._latency = latency_s
        self._per_byte = 1.0 / bytes_per_s
        # Sums over transfers of weight · (1, bytes, bytes², seconds, bytes · seconds), the weights 1 / seconds².
        self._sums = [0.0] * 5
        for size in (0.0, latency_s * bytes_per_s):
            self._add(size, latency_s + size / bytes_per_s, FORGET)

    def seconds(self, size: int) -> float:
        """Return the predicted seconds of a transfer of `size` bytes, 0 for nothing."""
        return self._latency + size * self._per_byte if size else 0.0

    def observe(self, transfer: TransferStats) -> None:
        """Learn from a transfer that has ended; one without bytes or duration is ignored."""
        seconds = transfer.duration_nanos / 1e9
        if transfer.bytes <= 0 or seconds <= 0.0:
            return
        self._sums = [each * (1 - FORGET) for each in self._sums]
        self._add(transfer.bytes, min(seconds, OUTLIER * self.seconds(transfer.bytes)), 1.0)
        self._solve()

    def _add(self, size: float, seconds: float, count: float) -> None:
        weight = count / seconds**2
        for i, value in enumerate((1.0, size, size * size, seconds, size * seconds)):
            self._sums[i] += weight * value

    def _solve(self) -> None:
        """Solve for both >= 0. Where all transfers have one size, the known line is scaled to it."""
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
