"""The time of the all-to-all exchange between GPUs that hold different experts (expert parallelism over hosts).

Before the experts of a layer, a GPU sends the hidden states of its tokens in 8 bits to the GPUs with the experts that
they chose (dispatch), and receives the results in 16 bits (combine). A prompt token is sent once to each host with any
of its experts, and there over NVLink; a decode row is sent to each of its experts, which has a lower latency. Each GPU
has its own network adapter of 400 Gbit/s. The rates are those of DeepEP 1 on H800 (its README), in GB/s:

    GPUs               16    32    64    128    256
    prompt tokens      43    58    51
    decode rows        63    48    43     39     39

Assumed are 50 for prompt tokens, the rate of the adapter, and 40 for decode rows.
"""

from dataclasses import dataclass, replace

from tandem.protocol.cost_parameters import CostParameters

HOST_GPUS = 8
_TOKEN_BYTES_PER_S, _ROW_BYTES_PER_S = 5e10, 4e10
_ELEMENT_BYTES = 1 + 2
"""Bytes of an element of a hidden state that is sent and comes back."""


@dataclass(frozen=True, slots=True)
class ExpertExchange:
    """The exchange in each step of `gpus` GPUs, in `layers` layers whose tokens choose `top_k` experts each."""

    gpus: int
    layers: int
    top_k: int
    hidden_size: int
    """The number of elements of a token's input of an expert: the hidden size, or that of the experts' latents."""

    @property
    def token_s(self) -> float:
        """The time of a GPU's prompt token in seconds.

        The token is sent to the expected number of hosts with any of its experts, if it chooses them independently.
        """
        hosts = max(1.0, self.gpus / HOST_GPUS)
        chosen = hosts * (1 - (1 - 1 / hosts) ** self.top_k)
        return self._bytes * chosen / _TOKEN_BYTES_PER_S

    @property
    def row_s(self) -> float:
        """The time of a GPU's decode row in seconds."""
        return self._bytes * self.top_k / _ROW_BYTES_PER_S

    @property
    def _bytes(self) -> int:
        return self.layers * self.hidden_size * _ELEMENT_BYTES

    def added_to(self, cost: CostParameters) -> CostParameters:
        """Return the step cost of a GPU, `cost`, plus that of the exchange, which hides behind nothing."""
        return replace(cost, token_s=cost.token_s + self.token_s, row_s=cost.row_s + self.row_s)

    def overlapped_by(self, cost: CostParameters, weights_s: float) -> CostParameters:
        """Return the step cost of a GPU that computes one half of a step while the other half is exchanged.

        The longer of a token's arithmetic and exchange counts (two-batch overlap). Each half reads the weights, which
        takes `weights_s` seconds.
        """
        return replace(
            cost,
            base_s=cost.base_s + weights_s,
            token_s=max(cost.token_s, self.token_s),
            row_s=max(cost.row_s, self.row_s),
        )
