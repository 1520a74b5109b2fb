"""Reorders weight rows that checkpoints store in another order than kernels need."""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.config.model import GroupedQueryAttention, ModelSpec
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, standard_slots


def paired_rope_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of a model whose checkpoints store the two rows of each rotated pair next to each other.

    The names are those of Llama's checkpoints, and all layers have grouped-query attention. Rows of q and k are
    reordered.
    """
    result = standard_slots(spec, parameters)
    for number, layer in enumerate(spec.layers):
        assert isinstance(layer.attention, GroupedQueryAttention)
        shape = layer.attention.shape
        for name, heads in (("q_proj", shape.heads), ("k_proj", shape.kv_heads)):
            for kind in ("weight", "bias"):
                key = f"model.layers.{number}.self_attn.{name}.{kind}"
                if key in result:
                    result[key] = permute_rope_rows(result[key], heads, shape.head_dim, slice(0, shape.rotated))
    return result


def permute_rope_rows(slot: ParameterSlot, heads: int, dims: int, rotated: slice) -> ParameterSlot:
    """Return a slot that reorders the rotated rows of a weight as the kernels need them.

    The checkpoint stores the two rows of each rotated pair next to each other; the kernels need them half a width
    apart. The weight has `heads` heads of `dims` rows each; in each head, the rows `rotated` are reordered.
    """

    def reorder(stored: Tensor) -> Tensor:
        rows = stored.reshape(heads, dims, -1).clone()
        pairs = rows[:, rotated]
        rows[:, rotated] = torch.cat((pairs[:, 0::2], pairs[:, 1::2]), dim=1)
        return rows.view(stored.shape)

    return replace(slot, transform=reorder)
