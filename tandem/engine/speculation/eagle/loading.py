"""Loads heads, in the target model's dtype and on its device; they use its embedding, and mostly its output layer."""

from dataclasses import replace

import torch
from torch import Tensor

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.models.parameters import Parameters
from tandem.engine.speculation.eagle.folder import (
    BIAS,
    EMBEDDING_NORM,
    OUTPUT_NORM,
    PRODUCT,
    PROJECTION,
    STATE_NORM,
    TOKEN_OFFSETS,
    EagleFolder,
    empty_layer,
    layer_slots,
)
from tandem.engine.speculation.eagle.model import Eagle3Model, EagleModel, HeadModel, JoinedInput
from tandem.engine.speculation.eagle.mtp import MtpLayer
from tandem.engine.speculation.heads.medusa import projection_rows
from tandem.engine.weights.tensor_reader import read_tensors
from tandem.protocol.errors import ModelError


def load_head(
    head: EagleFolder | MtpLayer, target: ModelSpec, parameters: Parameters, kernels: Kernels, rows: int
) -> HeadModel:
    """Load a head for the target model `target` with the weights `parameters`.

    `kernels` are the head's own, and `rows` is the maximum number of tokens in a step of the head. Raises ModelError,
    which says what does not fit.
    """
    norm = Norm(parameters.final_norm, target.norm_eps)
    if isinstance(head, EagleFolder):
        return _load_eagle(head, norm, parameters, kernels, rows)
    return _load_mtp(head, norm, parameters, kernels, rows)


def _load_eagle(head: EagleFolder, target_norm: Norm, parameters: Parameters, kernels: Kernels, rows: int) -> HeadModel:
    spec, device = head.spec, parameters.embedding.device
    layer = empty_layer(spec, parameters.dtype, device, third=bool(head.target_layers))
    tensors = {name: slot.tensor for name, slot in layer_slots(spec, layer).items()}
    for name in head.entries.keys() - tensors.keys():
        dtype = torch.int64 if name == TOKEN_OFFSETS else parameters.dtype
        tensors[name] = torch.empty(head.entries[name].shape, dtype=dtype, device=device)
    read = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    read_tensors(head.entries, read)
    token_map = _token_map(head, read.get(TOKEN_OFFSETS))
    if head.own_projection:
        projection = tensors[PROJECTION]
    else:
        projection = parameters.lm_head if token_map is None else projection_rows(parameters, token_map)
    whole = replace(layer, embedding=parameters.embedding, lm_head=projection)
    product = Linear(read[PRODUCT], read.get(BIAS))
    if not head.target_layers:
        return EagleModel(
            spec,
            whole,
            kernels,
            rows,
            joined=JoinedInput(product),
            target_norm=target_norm,
            output_norm=None,
            token_map=token_map,
        )
    whole = replace(whole, final_norm=read[OUTPUT_NORM])
    return Eagle3Model(
        spec,
        whole,
        kernels,
        rows,
        product=product,
        embedding_norm=Norm(read[EMBEDDING_NORM], spec.norm_eps),
        state_norm=Norm(read[STATE_NORM], spec.norm_eps),
        norm_before_residual=head.norm_before_residual,
        token_map=token_map,
    )


def _token_map(head: EagleFolder, offsets: Tensor | None) -> Tensor | None:
    """Return the ids of the tokens that a head can predict, in the order of its outputs; None = all tokens."""
    if offsets is None:
        return None
    token_map = offsets + torch.arange(len(offsets), device=offsets.device)
    size = head.spec.vocab_size
    if not 0 <= int(token_map.min()) <= int(token_map.max()) < size:
        raise ModelError(f"{head.folder}: {TOKEN_OFFSETS} names tokens outside of the vocabulary of {size}.")
    return token_map


def _load_mtp(head: MtpLayer, target_norm: Norm, parameters: Parameters, kernels: Kernels, rows: int) -> HeadModel:
    spec, eps, device = head.spec, head.spec.norm_eps, parameters.embedding.device
    weights = head.load(parameters.dtype, device)
    joined = JoinedInput(
        Linear(weights.projection),
        Norm(weights.embedding_norm, eps),
        Norm(weights.state_norm, eps),
        head.layout.state_first,
    )
    return EagleModel(
        spec,
        replace(weights.decoder, embedding=parameters.embedding, lm_head=parameters.lm_head),
        kernels,
        rows,
        joined=joined,
        target_norm=target_norm,
        output_norm=Norm(weights.decoder.final_norm, eps),
    )
