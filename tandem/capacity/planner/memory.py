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
    draft_weight_bytes: float = 0.0
    """The weights of a draft model or of heads."""
    draft_kv_bytes_per_token: float = 0.0
    """The KV of a token in the draft model, whose pages hold as many tokens; 0 without one."""

    @property
    def kv_bytes(self) -> float:
        """Bytes of the model's KV page pool, 0 if the weights leave none."""
        left = max(self.device_bytes - self.weight_bytes - self.draft_weight_bytes - OVERHEAD_BYTES, 0.0)
        return left * self.kv_bytes_per_token / (self.kv_bytes_per_token + self.draft_kv_bytes_per_token)

    @property
    def kv_tokens(self) -> float:
        """Tokens that the KV page pool holds."""
        return self.kv_bytes / self.kv_bytes_per_token
