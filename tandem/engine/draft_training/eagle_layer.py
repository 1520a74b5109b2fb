"""The EAGLE head during training: one decoder layer in float32, and how it predicts several tokens one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import GroupedQueryAttention, ModelSpec
from tandem.engine.config.rope import RopeConfig
from tandem.engine.draft_training.train_heads import BaseWeights
from tandem.engine.models.rope import rope_table
from tandem.protocol.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class EagleSizes:
    """The sizes of the EAGLE head's layer.

    Heads and RoPE base are those of the model's last layer. The width is that of the model's widest dense feed-forward
    network.
    """

    shape: AttentionShape
    rope: RopeConfig
    width: int
    """The number of inner elements of the feed-forward network."""

    @classmethod
    def of(cls, spec: ModelSpec) -> "EagleSizes":
        """Return the sizes of the EAGLE head for a model.

        Raises InvalidArgument if the model has no grouped-query attention, no rotary embedding, or no dense
        feed-forward network.
        """
        attention = spec.layers[-1].attention
        if not isinstance(attention, GroupedQueryAttention) or attention.rope is None or not spec.dense_widths:
            raise InvalidArgument(
                "kind",
                "eagle trains a layer like the model's last one, which must have grouped-query attention with rotary"
                " embedding, and a dense feed-forward network; train medusa heads.",
            )
        model_shape = attention.shape
        # Outputs are short, so the RoPE scaling for long contexts is not needed.
        shape = AttentionShape(
            model_shape.heads, model_shape.kv_heads, model_shape.head_dim, model_shape.head_dim**-0.5
        )
        return cls(shape, RopeConfig(theta=attention.rope.theta), max(spec.dense_widths))


Tokens = Callable[[int, Tensor], Tensor]
"""A function that returns the tokens [B, T] int64 that a step of `EagleLayer.chain` reads together with its states.

Its arguments are the number of the step and these states [B, T, H]: the model's in step 0, later the predicted ones.
"""


class EagleLayer(nn.Module):
    """An EAGLE head: a decoder layer without its first norm, and the linear layer that computes its input.

    See `tandem/engine/speculation/eagle/`.
    """

    def __init__(self, base: BaseWeights, sizes: EagleSizes, token_map: Tensor | None, longest: int) -> None:
        """Initialize the layer so that it passes hidden states on unchanged.

        `longest` is the maximum number of tokens of an output and of its draft tokens together. `token_map` is that of
        `MedusaHeads`.
        """
        super().__init__()
        self.base, self.sizes, self.token_map = base, sizes, token_map
        hidden, shape = base.embedding.shape[1], sizes.shape
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.qkv = nn.Linear(hidden, shape.qkv_size, bias=False)
        self.output = nn.Linear(shape.heads * shape.head_dim, hidden, bias=False)
        self.norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Linear(hidden, 2 * sizes.width, bias=False)
        self.down = nn.Linear(sizes.width, hidden, bias=False)
        device = base.embedding.device
        self.projection = (base.projection if token_map is None else base.projection[token_map]).float()
        """[V', H]: the rows of the model's projection for the tokens that the head can predict."""
        self._rope = rope_table(sizes.rope, shape.head_dim, longest, device)
        # Initially the layer adds nothing, and `fc` passes the hidden state on unchanged.
        with torch.no_grad():
            self.fc.weight[:, hidden:].copy_(torch.eye(hidden))
            for last in (self.output, self.down):
                last.weight.zero_()
        self.to(device)

    def guesses(self, states: Tensor) -> Tensor:
        """Return the most likely tokens [...] for states [..., H]."""
        rows = linear(states, self.projection).argmax(-1)
        return rows if self.token_map is None else self.token_map[rows]

    def chain(self, states: Tensor, tokens: Tokens, steps: int) -> list[Tensor]:
        """Return the predicted states [B, T, H] after each position, one tensor for each of `steps` consecutive steps.

        The first step reads the model's own normalized `states` [B, T, H] and the tokens sampled from them; each later
        step reads the result of the previous step. A position attends to the model's states up to its own, and to its
        own previous steps.
        """
        predicted: list[Tensor] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            x = self.fc(torch.cat((embedding(tokens(step, states), self.base.embedding).float(), states), dim=-1))
            q, key, value = self._heads(x, step)
            pairs.append((key, value))
            x = x + self.output(self._attend(q, pairs))
            gate, up = self.gate_up(rms_norm(x, x.shape[-1:], self.norm, self.base.eps)).chunk(2, dim=-1)
            states = x + self.down(silu(gate) * up)
            predicted.append(states)
        return predicted

    def _attend(self, q: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the output of the heads [B, T, heads·dim] over the keys and values of all steps.

        Of the first step's keys, a position attends to those up to its own; of the later steps' keys, only to its own.
        """
        (keys, values), *own = pairs
        scores, length = q @ keys.transpose(-1, -2), keys.shape[-2]
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        every = [scores.masked_fill(future, -torch.inf), *((q * key).sum(-1, keepdim=True) for key, _ in own)]
        weights = (torch.cat(every, dim=-1) * self.sizes.shape.scale).softmax(-1)
        mixed = weights[..., :length] @ values
        for weight, (_, value) in zip(weights[..., length:].unbind(-1), own, strict=True):
            mixed = mixed + weight.unsqueeze(-1) * value
        return mixed.transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, heads, T, dim], rotated for positions that start at `step`."""
        shape = self.sizes.shape
        parts = [shape.heads, shape.kv_heads, shape.kv_heads]
        q, k, v = self.qkv(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2).split(parts, dim=1)
        cos, sin = self._rope[step : step + x.shape[1]].chunk(2, dim=-1)
        repeats = shape.heads // shape.kv_heads
        return (
            _rotated(q, cos, sin),
            _rotated(k, cos, sin).repeat_interleave(repeats, 1),
            v.repeat_interleave(repeats, 1),
        )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
