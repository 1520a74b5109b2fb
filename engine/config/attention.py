"""The shape of a layer's attention."""

from dataclasses import dataclass

from engine.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and scale of attention; `window` is the number of latest positions a token sees, None = all."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


def attention_shape(model: ModelConfig, layer: int) -> AttentionShape:
    """Returns the attention shape of layer number `layer`."""
    return AttentionShape(
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        scale=model.head_dim**-0.5,
        window=model.windows[layer],
    )
