"""DeepSeek-V2 and V2-Lite: latent attention, and experts that are chosen within groups."""

from dataclasses import replace

from tandem.engine.config.attention import LatentShape
from tandem.engine.config.model import (
    ExpertRouter,
    FeedForward,
    LatentAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
)
from tandem.engine.config.rope import RopeConfig, parse_rope, yarn_temperature
from tandem.engine.models.families.family import (
    Family,
    Json,
    check_sizes,
    make_model,
    parse_activation,
    parse_dense,
    parse_dense_layers,
    parse_expert_count,
)
from tandem.engine.models.families.rows import permute_rope_rows
from tandem.engine.models.parameters import LatentParameters, Parameters
from tandem.engine.models.slots import ParameterSlot, standard_slots
from tandem.protocol.errors import ModelError

_QUERY_RANK = 1536
"""The query rank if config.json does not have `q_lora_rank`, as in transformers.

If `q_lora_rank` is null, queries have no low-rank projection.
"""
_NORM_EPS = 1e-6
"""The epsilon of the norms of latents; config.json has only that of the other norms."""


def _parse(config: Json) -> ModelSpec:
    method = config.get("topk_method") or "greedy"
    if method not in {"greedy", "group_limited_greedy"}:
        raise ModelError(f"topk_method {method!r} is not supported; greedy and group_limited_greedy are.")
    router = ExpertRouter(renormalize=False, scaling=float(config.get("routed_scaling_factor") or 1.0))
    if method == "group_limited_greedy":
        router = replace(router, groups=int(config["n_group"]), top_groups=int(config["topk_group"]))
    return latent_model(config, "DeepseekV2ForCausalLM", router)


def latent_model(config: Json, architecture: str, router: ExpertRouter) -> ModelSpec:
    """Return the spec of a model with latent attention, in which some layers have no experts."""
    attention = _attention(config)
    dense = parse_dense(config)
    dense_layers = parse_dense_layers(config)
    experts = _experts(config, router) if config.get("n_routed_experts") or config.get("num_local_experts") else None
    layers = []
    for number in range(int(config["num_hidden_layers"])):
        feed_forward: FeedForward = dense if number in dense_layers or experts is None else experts
        layers.append(LayerSpec(attention, feed_forward))
    return make_model(config, architecture, layers)


def _experts(config: Json, router: ExpertRouter) -> MixtureOfExperts:
    width = int(config["moe_intermediate_size"])
    if int(config.get("moe_layer_freq") or 1) != 1:
        raise ModelError("moe_layer_freq other than 1 is not supported.")
    return MixtureOfExperts(
        experts=parse_expert_count(config),
        top_k=int(config["num_experts_per_tok"]),
        width=width,
        router=router,
        activation=parse_activation(config),
        shared_width=width * int(config.get("n_shared_experts") or 0),
    )


def _attention(config: Json) -> LatentAttention:
    nope, rotated = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
    rope, scale = parse_rope(config), (nope + rotated) ** -0.5
    if rope.kind == "yarn":
        scale *= _temperature(config, rope) ** 2
    shape = LatentShape(
        heads=int(config["num_attention_heads"]),
        latent=int(config["kv_lora_rank"]),
        rope=rotated,
        nope=nope,
        v_dim=int(config["v_head_dim"]),
        scale=scale,
    )
    check_sizes(
        num_attention_heads=shape.heads,
        kv_lora_rank=shape.latent,
        qk_rope_head_dim=shape.rope,
        qk_nope_head_dim=shape.nope,
        v_head_dim=shape.v_dim,
    )
    if shape.rope % 2:
        raise ModelError(f"qk_rope_head_dim {shape.rope} is not supported; rotary embedding needs pairs of dimensions.")
    if not config.get("rope_interleave", True):
        raise ModelError("rope_interleave false is not supported; rotated dimensions are stored in neighbouring pairs.")
    rank, biased = config.get("q_lora_rank", _QUERY_RANK), bool(config.get("attention_bias"))
    if rank is not None and int(rank) < 1:
        raise ModelError(f"q_lora_rank {rank} is not supported; null is no rank.")
    if rank is None and biased:
        raise ModelError("attention_bias without q_lora_rank is not supported.")
    return LatentAttention(shape, rope, None if rank is None else int(rank), _NORM_EPS, bias=biased)


def _temperature(config: Json, rope: RopeConfig) -> float:
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    return yarn_temperature(rope.factor, float(scaling.get("mscale_all_dim") or 0.0))


def latent_slots(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the slots of a model with latent attention, but those of layers with another kind of attention.

    Its checkpoints store the two rows of each rotated pair next to each other, so they are reordered.
    """
    all_slots = standard_slots(spec, parameters)
    for number, (layer, weights) in enumerate(zip(spec.layers, parameters.layers, strict=True)):
        if not (isinstance(layer.attention, LatentAttention) and isinstance(weights.attention, LatentParameters)):
            continue
        prefix = f"model.layers.{number}.self_attn."
        slots = _layer_slots(layer.attention, weights.attention)
        all_slots |= {prefix + name: slot for name, slot in slots.items()}
    return all_slots


def _layer_slots(spec: LatentAttention, weights: LatentParameters) -> dict[str, ParameterSlot]:
    shape = spec.shape
    rotated_key = slice(shape.latent, shape.projected)
    first = weights.down.shape[0] - shape.projected
    queries = weights.down[:first] if weights.query_up is None else weights.query_up
    name = "q_proj" if weights.query_up is None else "q_b_proj"
    slots = {
        f"{name}.weight": permute_rope_rows(
            ParameterSlot(queries), shape.heads, shape.query, slice(shape.nope, shape.query)
        ),
        "kv_a_proj_with_mqa.weight": permute_rope_rows(
            ParameterSlot(weights.down[first:]), 1, shape.projected, rotated_key
        ),
        "kv_a_layernorm.weight": ParameterSlot(weights.latent_norm),
        "kv_b_proj.weight": ParameterSlot(weights.kv_up.view(-1, shape.latent)),
        "o_proj.weight": ParameterSlot(weights.output),
    }
    if weights.query_norm is not None:
        slots |= {
            "q_a_proj.weight": ParameterSlot(weights.down[:first]),
            "q_a_layernorm.weight": ParameterSlot(weights.query_norm),
        }
    if weights.down_bias is not None and weights.output_bias is not None:
        slots["kv_a_proj_with_mqa.bias"] = permute_rope_rows(
            ParameterSlot(weights.down_bias[first:]), 1, shape.projected, rotated_key
        )
        slots["o_proj.bias"] = ParameterSlot(weights.output_bias, summed=True)
        if weights.query_norm is not None:
            slots["q_a_proj.bias"] = ParameterSlot(weights.down_bias[:first])
    return slots


FAMILY = Family(("DeepseekV2ForCausalLM",), ("deepseek_v2",), _parse, latent_slots)
