"""What steps should take by the device's ceilings and the model's size, before any was measured."""

from dataclasses import dataclass

from wire.cost_parameters import CostParameters

_FLOP_A_WEIGHT = 2
"""A weight is multiplied and added once for each token."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device can do at best."""

    flops: float
    """Floating-point operations a second, in the model's dtype."""
    bytes_per_s: float
    """Bytes a second between its memory and its cores."""
    launch_s: float
    """Seconds a step costs beside arithmetic and memory."""


GPU = Ceilings(flops=6e14, bytes_per_s=4e12, launch_s=3e-4)
"""Of the kind of an H200 in bfloat16, as measured: a guess for others."""
CPU = Ceilings(flops=1e11, bytes_per_s=2e10, launch_s=1e-4)
"""Of a few cores in float32."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a step of a model reads and computes."""

    weights: int
    """Elements of all matrices that every token is multiplied with; embeddings count where they are the output's."""
    weight_bytes: int
    """Bytes of them."""
    kv_bytes_per_token: int
    """Bytes of keys and values of one token, all layers."""
    attention_flop_per_pair: int
    """Operations of one token attending to one other, all layers and heads."""


def guess(sizes: ModelSizes, device: Ceilings) -> CostParameters:
    """The parameters a worker starts with."""
    token_s = _FLOP_A_WEIGHT * sizes.weights / device.flops
    weights_s = sizes.weight_bytes / device.bytes_per_s
    return CostParameters(
        base_s=weights_s + device.launch_s,
        prompt_base_s=device.launch_s,
        token_s=token_s,
        pair_s=sizes.attention_flop_per_pair / device.flops,
        # Below the knee a row's arithmetic is hidden but not quite: large batches cost half as much again.
        row_s=token_s / 2,
        context_s=sizes.kv_bytes_per_token / device.bytes_per_s,
        free_tokens=int(weights_s / token_s),
    )
