"""The part of a model's weights that one rank of a group holds: its allocation, and its slots in a checkpoint."""

from dataclasses import replace

import torch

from tandem.engine.config.model import ModelSpec
from tandem.engine.config.sharding import Rank, rank_spec
from tandem.engine.models.allocation import allocate_parameters, parameter_bytes
from tandem.engine.models.families import slots_of
from tandem.engine.models.parameters import Parameters, ParameterSlot, StoredPart

_META = torch.device("meta")
_MATRIX = 2
"""The number of dimensions of a weight matrix; stacked experts have one more."""


def allocate_rank(
    spec: ModelSpec, rank: Rank, dtype: torch.dtype, device: torch.device, *, whole_output: bool = False
) -> Parameters:
    """Allocate the part of a model's weights that one rank holds; `spec` describes the whole model.

    Each rank has its own rows of the output layer; the first rank has all rows with `whole_output`, and if the
    embedding is also the output layer. Only the first rank has the embedding, because it computes the embeddings for
    all ranks.
    """
    own, rows = rank_spec(spec, rank.count, rank.number), rank.rows(spec.vocab_size)
    if rank.count == 1 or (rank.leads and (spec.tied_embeddings or whole_output)):
        return allocate_parameters(own, dtype, device)
    parameters = allocate_parameters(replace(own, vocab_size=len(rows)), dtype, device)
    if spec.tied_embeddings:
        return parameters
    table = replace(own, layers=(), tied_embeddings=True)
    return replace(parameters, embedding=allocate_parameters(table, dtype, device if rank.leads else _META).embedding)


def rank_bytes(spec: ModelSpec, rank: Rank, dtype: torch.dtype, *, on_cpu: bool, whole_output: bool = False) -> int:
    """Return the size in bytes of the weights that `allocate_rank` allocates, in the form that the kernels keep."""
    parameters = allocate_rank(spec, rank, dtype, _META, whole_output=whole_output)
    if not rank.leads:
        parameters = replace(parameters, embedding=parameters.lm_head)
    return parameter_bytes(parameters, on_cpu=on_cpu)


def rank_slots(spec: ModelSpec, rank: Rank, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slot of each tensor of a checkpoint by name, with the part of the tensor that `rank` reads.

    `spec` is that of the whole model, and `parameters` were allocated by `allocate_rank`. A tensor is divided among the
    ranks along the dimension in which it is longer in the checkpoint than in `parameters`. The slots of other ranks'
    experts are on the `meta` device.
    """
    if rank.count == 1:
        return slots_of(spec, parameters)
    whole = slots_of(spec, allocate_parameters(spec, torch.float32, _META))
    ends = {id(parameters.embedding), id(parameters.lm_head)}
    return whole | {
        name: replace(slot, part=_part(slot, whole[name], rank, by_token=id(slot.tensor) in ends))
        for name, slot in slots_of(rank_spec(spec, rank.count, rank.number), parameters).items()
    }


def _part(slot: ParameterSlot, whole: ParameterSlot, rank: Rank, *, by_token: bool) -> StoredPart | None:
    own, shape = slot.own_shape, whole.own_shape
    if own == shape:
        return StoredPart(shape) if slot.summed and not rank.leads else None
    (dim,) = (number for number, length in enumerate(own) if length != shape[number])
    if by_token:
        return StoredPart(shape, dim, (rank.rows(shape[dim]),))
    # Whole experts are divided along their first dimension, also where each of them has stacked weights.
    by_expert = dim == 0 and len(own) > _MATRIX
    lengths, totals = ((own[dim],), (shape[dim],)) if by_expert or not slot.stacked else (slot.stacked, whole.stacked)
    ranges = []
    start = 0
    for length, total in zip(lengths, totals, strict=True):
        # If there are more ranks than KV heads, several ranks read the same part.
        first = start + rank.number * (total // length) // rank.count * length
        ranges.append(range(first, first + length))
        start += total
    return StoredPart(shape, dim, tuple(ranges))
