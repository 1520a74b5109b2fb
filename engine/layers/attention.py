"""What each layer of a model attends to."""

from engine.kernels.base import AttentionShape
from engine.models.config import ModelConfig


def attention_shape(model: ModelConfig, layer: int) -> AttentionShape:
    """Of layer number `layer`."""
    return AttentionShape(
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        scale=model.head_dim**-0.5,
        window=model.windows[layer],
    )
