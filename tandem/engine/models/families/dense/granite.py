"""Granite 3: embeddings, residuals, attention scores and logits are multiplied by constants."""

from tandem.engine.config.model import FeedForward, ModelSpec
from tandem.engine.models.families.family import Family, Json, grouped_layers, make_model, parse_dense, parse_shape


def granite_model(config: Json, architecture: str, feed_forward: FeedForward) -> ModelSpec:
    """Return the spec of an equivalent model without a multiplier of residuals.

    With multiplier m and hidden = m · h, a layer hidden += m · f(norm(hidden)) becomes h += f(norm(h)), if the epsilon
    of each norm is divided by m².
    """
    biased = bool(config.get("attention_bias"))
    layers = grouped_layers(
        config,
        parse_shape(config, scale=float(config.get("attention_multiplier", 1.0))),
        (None,) * int(config["num_hidden_layers"]),
        feed_forward,
        qkv_bias=biased,
        output_bias=biased,
    )
    residual = float(config.get("residual_multiplier", 1.0))
    return make_model(
        config,
        architecture,
        layers,
        norm_eps=float(config.get("rms_norm_eps") or 1e-6) / residual**2,
        embedding_scale=float(config.get("embedding_multiplier", 1.0)) / residual,
        logits_scale=1.0 / float(config.get("logits_scaling", 1.0)),
    )


def _parse(config: Json) -> ModelSpec:
    return granite_model(config, "GraniteForCausalLM", parse_dense(config, bias=bool(config.get("mlp_bias"))))


FAMILY = Family(("GraniteForCausalLM",), ("granite",), _parse)
