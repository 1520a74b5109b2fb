"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, in which an indexer chooses the tokens that a token attends to."""

from dataclasses import replace

from tandem.engine.config.attention import IndexShape
from tandem.engine.config.model import LatentAttention, LayerSpec, ModelSpec
from tandem.engine.models.families.family import Family, Json, check_sizes, parse_sigmoid_router
from tandem.engine.models.families.latent.deepseek_v2 import latent_model, latent_slots
from tandem.engine.models.mtp_layout import NUMBERED_MTP
from tandem.engine.models.parameters import IndexerParameters, LatentParameters, Parameters
from tandem.engine.models.slots import ParameterSlot
from tandem.protocol.errors import ModelError

_DEFAULTS = {"first_k_dense_replace": 3, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
"""The defaults of transformers for fields that config.json may leave out."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    return sparse_model(config, latent_model(config, "DeepseekV32ForCausalLM", parse_sigmoid_router(config)))


def sparse_model(config: Json, spec: ModelSpec, shared: frozenset[int] = frozenset()) -> ModelSpec:
    """Return the model with an indexer in each layer, except the layers `shared`, which share the choice of the last.

    Raises ModelError if the sizes of the indexer are not supported.
    """
    index = IndexShape(int(config["index_n_heads"]), int(config["index_head_dim"]), int(config["index_topk"]))
    check_sizes(index_n_heads=index.heads, index_head_dim=index.dim, index_topk=index.top_k)
    if 0 in shared:
        raise ModelError("the first layer has no indexer, and no layer before it whose choice it could share.")

    def sparse(number: int, layer: LayerSpec) -> LayerSpec:
        attention = layer.attention
        assert isinstance(attention, LatentAttention)
        if attention.query_rank is None:
            raise ModelError("sparse attention without q_lora_rank is not supported.")
        if index.dim < attention.shape.rope:
            raise ModelError(f"index_head_dim {index.dim} is below qk_rope_head_dim {attention.shape.rope}.")
        if number in shared:
            return replace(layer, attention=replace(attention, shares_choice=True))
        return replace(layer, attention=replace(attention, shape=replace(attention.shape, index=index)))

    return replace(spec, layers=tuple(sparse(number, layer) for number, layer in enumerate(spec.layers)))


def sparse_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of a model with indexers, whose rotated rows are stored half a width apart."""
    slots = latent_slots(spec, parameters)
    for number, weights in enumerate(parameters.layers):
        assert isinstance(weights.attention, LatentParameters)
        if weights.attention.indexer is not None:
            named = _indexer_slots(weights.attention.indexer)
            slots |= {f"model.layers.{number}.self_attn.indexer.{name}": slot for name, slot in named.items()}
    return slots


def _indexer_slots(weights: IndexerParameters) -> dict[str, ParameterSlot]:
    return {
        "wq_b.weight": ParameterSlot(weights.query_up),
        "wk.weight": ParameterSlot(weights.index_key),
        "k_norm.weight": ParameterSlot(weights.key_norm),
        "k_norm.bias": ParameterSlot(weights.key_norm_bias),
        "weights_proj.weight": ParameterSlot(weights.head_weights),
    }


FAMILY = Family(("DeepseekV32ForCausalLM",), ("deepseek_v32",), _parse, sparse_slots, NUMBERED_MTP)
