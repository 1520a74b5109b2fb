"""The memory of a model on a device, and the KV tokens that fit into the rest."""

from dataclasses import dataclass

GIB = 1 << 30
OVERHEAD_BYTES = 2 * GIB
"""Memory of a GPU worker other than weights and KV: context, kernels, graphs and activations."""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of one worker, in bytes."""

    device_bytes: float
    """Memory that the worker may use."""
    weight_bytes: float
    kv_bytes_per_token: float

    @property
    def kv_bytes(self) -> float:
        """Bytes of the KV page pool, 0 if the weights leave none."""
        return max(self.device_bytes - self.weight_bytes - OVERHEAD_BYTES, 0.0)

    @property
    def kv_tokens(self) -> float:
        """Tokens that the KV page pool holds."""
        return self.kv_bytes / self.kv_bytes_per_token
