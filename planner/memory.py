"""What a model takes of a device's memory, and how many tokens of KV the rest holds."""

from dataclasses import dataclass

GIB = 1 << 30
OVERHEAD_BYTES = 2 * GIB
"""Of a worker on a GPU beside weights and KV: context, kernels, graphs and activations."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one worker, in bytes."""

    device_bytes: float
    """That it may use."""
    weight_bytes: float
    kv_bytes_per_token: float

    @property
    def kv_bytes(self) -> float:
        """For its page pool, 0 if the weights do not leave any."""
        return max(self.device_bytes - self.weight_bytes - OVERHEAD_BYTES, 0.0)

    @property
    def kv_tokens(self) -> float:
        return self.kv_bytes / self.kv_bytes_per_token
