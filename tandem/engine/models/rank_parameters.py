"""The part of a model's weights that one rank of a group holds: its allocation, and its slots in a checkpoint."""

from dataclasses import replace

import torch

from tandem.engine.config.model import ModelSpec
from tandem.engine.config.sharding import Rank, rank_spec, stage_layers
from tandem.engine.kernels.packed_weight import Weight
from tandem.engine.models.allocation import allocate_parameters, empty_on, parameter_bytes
from tandem.engine.models.families import slots_of
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, StoredPart

_META = torch.device("meta")
_MATRIX = 2
"""The number of dimensions of a weight matrix; stacked experts have one more."""


def allocate_rank(
    spec: ModelSpec, rank: Rank, dtype: torch.dtype, device: torch.device, *, whole_output: bool = False
) -> Parameters:
    """Allocate the part of a model's weights that one rank holds; `spec` describes the whole model.

    These are the layers of the rank's stage, and the final norm. Each rank of the last stage has its own rows of the
    output layer, which has no rows in the other stages; the leading rank has all rows with `whole_output`, and if the
    embedding is also the output layer. Only the rank that computes the embeddings has the embedding.
    """
    if rank.world_size == 1:
        return allocate_parameters(spec, dtype, device)
    # The layers are taken from the whole model, because the quantization of a layer may depend on its number.
    whole = allocate_parameters(rank_spec(spec, rank.count, rank.number), dtype, _META)
    held, rows = stage_layers(spec, rank.stages)[rank.stage], rank.rows(spec.vocab_size)
    embedding = empty_on(device, whole.embedding) if rank.embeds else whole.embedding
    lm_head: Weight
    if not rank.in_last_stage:
        lm_head = torch.empty(0, spec.hidden_size, dtype=dtype, device=device)
    elif spec.tied_embeddings and rank.embeds:
        lm_head = embedding
    else:
        lm_head = empty_on(device, whole.lm_head if rank.leads and whole_output else whole.lm_head[: len(rows)])
        if spec.tied_embeddings:
            embedding = lm_head
    layers = empty_on(device, whole.layers[held.start : held.stop])
    norm, bias = empty_on(device, (whole.final_norm, whole.final_norm_bias))
    return Parameters(dtype, embedding, lm_head, norm, layers, bias)


def rank_bytes(spec: ModelSpec, rank: Rank, dtype: torch.dtype, *, on_cpu: bool, whole_output: bool = False) -> int:
    """Return the size in bytes of the weights that `allocate_rank` allocates, in the form that the kernels keep."""
    parameters = allocate_rank(spec, rank, dtype, _META, whole_output=whole_output)
    if not rank.embeds:
        parameters = replace(parameters, embedding=parameters.lm_head)
    return parameter_bytes(parameters, on_cpu=on_cpu)


def rank_slots(spec: ModelSpec, rank: Rank, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slot of each tensor of a checkpoint by name, with the part of the tensor that `rank` reads.

    `spec` is that of the whole model, and `parameters` were allocated by `allocate_rank`. A tensor is divided among the
    ranks of a stage along the dimension in which it is longer in the checkpoint than in `parameters`. The slots of
    other ranks' experts and of what only other stages have are on the `meta` device.
    """
    if rank.world_size == 1:
        return slots_of(spec, parameters)
    own = rank_spec(spec, rank.count, rank.number)
    shapes, held = allocate_parameters(own, parameters.dtype, _META), stage_layers(spec, rank.stages)[rank.stage]
    layers = (*shapes.layers[: held.start], *parameters.layers, *shapes.layers[held.stop :])
    lm_head = parameters.lm_head if rank.in_last_stage else shapes.lm_head
    placed = replace(parameters, layers=layers, lm_head=lm_head)
    whole = slots_of(spec, allocate_parameters(spec, torch.float32, _META))
    ends = {id(placed.embedding), id(placed.lm_head)}
    return whole | {
        name: replace(slot, part=_part(slot, whole[name], rank, by_token=id(slot.tensor) in ends))
        for name, slot in slots_of(own, placed).items()
    }


def _part(slot: ParameterSlot, whole: ParameterSlot, rank: Rank, *, by_token: bool) -> StoredPart | None:
    own, shape = slot.own_shape, whole.own_shape
    if own == shape:
        return StoredPart(shape) if slot.summed and rank.number > 0 else None
    (dim,) = (number for number, length in enumerate(own) if length != shape[number])
    if by_token:
        return StoredPart(shape, dim, (rank.rows(shape[dim]),))
    # Whole experts are divided along their first dimension, also where each of them has stacked weights.
    by_expert = dim == 0 and len(slot.tensor.shape) > _MATRIX
    lengths, totals = ((own[dim],), (shape[dim],)) if by_expert or not slot.stacked else (slot.stacked, whole.stacked)
    ranges = []
    start = 0
    for length, total in zip(lengths, totals, strict=True):
        # If there are more ranks than KV heads, several ranks read the same part.
        first = start + rank.number * (total // length) // rank.count * length
        ranges.append(range(first, first + length))
        start += total
    return StoredPart(shape, dim, tuple(ranges))
