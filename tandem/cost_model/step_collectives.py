"""The time of the collective operations between the ranks of a worker in one step.

Ranks that divide the model (tensor parallelism) sum their terms twice in every layer, the embeddings are broadcast, and
the logits of sampled tokens are gathered. Ranks that divide the prompt tokens (context parallelism) gather the KV of
every layer. The times were measured on two H200 (docs/decisions/tensor_parallelism.md), except those of gathered KV,
which are assumed to be those of a sum by NCCL of as many bytes. For other GPUs the bandwidths are the same fractions of
their links. For more ranks the bytes grow as the algorithms say, and the latencies are assumed to stay the same;
neither has been measured.
"""

from dataclasses import dataclass, replace

from tandem.protocol.cost_parameters import CostParameters

_ONE_SHOT_S, _ONE_SHOT_SHARE = 2.7e-6, 0.36
"""Latency in seconds of a sum in one shot, and its bytes per second ÷ those of the link in one direction.

Measured in µs for 8 KiB, 256 KiB and 1 MiB: 2.7, 4.2 and 9.1; predicted 2.7, 4.3 and 9.2.
"""
_NCCL_S, _NCCL_SHARE = 19e-6, 0.58
"""Latency and share of the link of a sum or gather by NCCL.

Sums measured in µs for 4 and 8 MiB: 35 and 51; predicted 35 and 51.
"""
_GATHER_S, _GATHER_SHARE = 6e-6, 0.23
"""Latency and share of the link of gathered logits.

Measured in µs for 1 and 32 rows of llama-3-8b: 7 and 46; predicted 7 and 46.
"""
_ROWS = 128
"""The cost of sums per decode row is that of a straight line up to this number of rows."""


@dataclass(frozen=True, slots=True)
class StepCollectives:
    """The collective operations of each step of a worker with `ranks` ranks.

    `link_bytes_per_s` is the bandwidth in one direction between two GPUs of a host.
    """

    ranks: int
    sums: int
    """Number of sums in a step, the broadcast of the embeddings included, which is a sum with zeros."""
    hidden_bytes: int
    """Bytes of a token's hidden state, which a sum adds."""
    logits_bytes: int
    """Bytes of the logits of a row that each rank computes."""
    link_bytes_per_s: float
    kv_gathers: int = 0
    """Number of gathers of KV in a step with prompts, one for each layer, if the ranks divide the prompt tokens."""
    kv_bytes: int = 0
    """Bytes of a token's KV in all layers, which these gathers copy to every other rank."""

    def added_to(self, cost: CostParameters) -> CostParameters:
        """Return the cost of a rank's steps, `cost`, plus that of the collective operations."""
        others = self.ranks - 1
        gather_row_s = others * self.logits_bytes / (_GATHER_SHARE * self.link_bytes_per_s)
        few, many = self._sum_seconds(1), self._sum_seconds(_ROWS)
        kv_token_s = others / self.ranks * self.kv_bytes / (_NCCL_SHARE * self.link_bytes_per_s)
        # The first tokens are free of arithmetic, but not of sums and gathers.
        free_s = self._nccl_seconds(cost.free_tokens) - few
        gathers_s = self.kv_gathers * _NCCL_S + cost.free_tokens * kv_token_s
        return replace(
            cost,
            base_s=cost.base_s + self.sums * few + _GATHER_S,
            prompt_base_s=cost.prompt_base_s + self.sums * free_s + gathers_s,
            token_s=cost.token_s + self.sums * (self._nccl_seconds(1) - _NCCL_S) + kv_token_s,
            row_s=cost.row_s + self.sums * (many - few) / (_ROWS - 1) + gather_row_s,
        )

    def _sum_seconds(self, tokens: int) -> float:
        """Return the time of a sum of the hidden states of decode rows, by the faster algorithm.

        In one shot, each rank sends its term to each other rank.
        """
        sent = (self.ranks - 1) * tokens * self.hidden_bytes
        return min(_ONE_SHOT_S + sent / (_ONE_SHOT_SHARE * self.link_bytes_per_s), self._nccl_seconds(tokens))

    def _nccl_seconds(self, tokens: int) -> float:
        """Return the time of a sum by NCCL, whose ring sends 2 · (ranks - 1) ÷ ranks of the bytes."""
        sent = 2 * (self.ranks - 1) / self.ranks * tokens * self.hidden_bytes
        return _NCCL_S + sent / (_NCCL_SHARE * self.link_bytes_per_s)


def with_divided_tokens(cost: CostParameters, ranks: int) -> CostParameters:
    """Return the cost of steps whose prompt tokens are divided among `ranks` ranks, without the gathers of KV.

    `cost` is that of the steps of a rank alone. All ranks have equally many tokens and attention pairs, and each reads
    all weights, so each has as many free tokens, and computes whole tiles and waves of its own tokens.
    """
    return replace(
        cost,
        token_s=cost.token_s / ranks,
        pair_s=cost.pair_s / ranks,
        free_tokens=cost.free_tokens * ranks,
        tile_tokens=cost.tile_tokens * ranks if cost.tile_tokens > 1 else 1,
        wave_tokens=cost.wave_tokens * ranks if cost.wave_tokens > 1 else 1,
    )
