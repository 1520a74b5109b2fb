"""The layout of multi-token prediction (MTP) layers in checkpoints (arXiv 2412.19437)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """The names of the tensors of a family's MTP layer; `{layer}` in a name is the number of the model's own layers.

    The MTP layer computes projection · (norm(embedding of a token), norm(hidden state that it was sampled from)), then
    a decoder layer like the model's last one with attention, and a norm before the model's own output layer.
    """

    prefix: str
    """The prefix of the decoder layer's tensors, in place of `model.layers.{layer}.`."""
    projection: str
    embedding_norm: str
    state_norm: str
    output_norm: str
    state_first: bool = False
    """True if the projection takes the hidden state before the embedding."""
    copies: tuple[str, ...] = ()
    """Copies of the model's embedding and output layer, which are not read."""


_NUMBERED = "model.layers.{layer}."
NUMBERED_MTP = MtpLayout(
    prefix=_NUMBERED,
    projection=f"{_NUMBERED}eh_proj.weight",
    embedding_norm=f"{_NUMBERED}enorm.weight",
    state_norm=f"{_NUMBERED}hnorm.weight",
    output_norm=f"{_NUMBERED}shared_head.norm.weight",
    copies=(f"{_NUMBERED}embed_tokens.weight", f"{_NUMBERED}shared_head.head.weight"),
)
"""The layout of DeepSeek-V3 and GLM-4.5, in which the MTP layer follows the model's own layers."""
