"""GLM-5: the sparse attention of DeepSeek-V3.2, in which some layers may share the choice of an earlier indexer."""

from tandem.engine.config.model import LatentAttention, ModelSpec
from tandem.engine.models.families.family import Family, Json, parse_sigmoid_router
from tandem.engine.models.families.latent.deepseek_v2 import latent_model
from tandem.engine.models.families.latent.deepseek_v32 import sparse_model, sparse_slots
from tandem.engine.models.families.rows import permute_rope_rows
from tandem.engine.models.mtp_layout import NUMBERED_MTP
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot
from tandem.protocol.errors import ModelError

_DEFAULTS = {
    "q_lora_rank": 2048,
    "rms_norm_eps": 1e-5,
    "first_k_dense_replace": 3,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
}
"""The defaults of transformers for fields that config.json may leave out."""


def _parse(given: Json) -> ModelSpec:
    config = _DEFAULTS | dict(given)
    spec = latent_model(config, "GlmMoeDsaForCausalLM", parse_sigmoid_router(config))
    return sparse_model(config, spec, _shared_layers(config))


def _shared_layers(config: Json) -> frozenset[int]:
    """Return the numbers of the layers without an indexer (arXiv:2603.12201).

    They are named by `indexer_types` or `index_topk_pattern`, or follow from `index_topk_freq`: then the layers up to
    `index_skip_topk_offset` have indexers, and after them every `index_topk_freq`-th layer.
    """
    layers = int(config["num_hidden_layers"])
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds is None:
        every, first = max(int(config.get("index_topk_freq") or 1), 1), int(config.get("index_skip_topk_offset", 2))
        return frozenset(number for number in range(layers) if max(number - first + 1, 0) % every)
    if len(kinds) != layers or set(kinds) - {"full", "shared", "F", "S"}:
        raise ModelError(f"indexer_types must name {layers} layers, each full or shared.")
    return frozenset(number for number, kind in enumerate(kinds) if kind in {"shared", "S"})


def _slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of the model; its indexers rotate pairs of rows that are stored next to each other."""
    slots = sparse_slots(spec, parameters)
    for number, layer in enumerate(spec.layers):
        assert isinstance(layer.attention, LatentAttention)
        shape = layer.attention.shape
        if (index := shape.index) is not None:
            for name, heads in (
                ("wq_b.weight", index.heads),
                ("wk.weight", 1),
                ("k_norm.weight", 1),
                ("k_norm.bias", 1),
            ):
                key = f"model.layers.{number}.self_attn.indexer.{name}"
                slots[key] = permute_rope_rows(slots[key], heads, index.dim, slice(0, shape.rope))
    return slots


FAMILY = Family(("GlmMoeDsaForCausalLM",), ("glm_moe_dsa",), _parse, _slots, NUMBERED_MTP)
