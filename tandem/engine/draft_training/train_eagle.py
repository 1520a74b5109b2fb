"""Trains an EAGLE head (arXiv 2401.15077) on outputs of the model, whose weights do not change.

At each position, the head learns to predict the model's own hidden state one token later, and the token distribution
that the model's projection gives for that state. The loss is the smooth L1 distance of the states plus a tenth of the
cross-entropy with that distribution, as published.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, smooth_l1_loss

from tandem.engine.config.model import ModelSpec
from tandem.engine.draft_training.answers import Answer
from tandem.engine.draft_training.eagle_layer import EagleLayer
from tandem.engine.draft_training.optimization import minimize
from tandem.engine.quantizer.folder_writer import FolderWriter
from tandem.engine.weights.checkpoint import Progress

ANSWERS_A_BATCH = 8
_CROSS_ENTROPY = 0.1
_BETAS = 0.9, 0.95
"""The decay rates of the optimizer's moving averages, as published."""
_CLIPPED_AT = 0.5
"""Maximum magnitude of a gradient element, as published."""


class _Batch(NamedTuple):
    """A batch of outputs, padded to one length."""

    states: Tensor
    """[B, T, H], normalized: the hidden state that each token was sampled from."""
    tokens: Tensor
    """[B, T] int64: the ids of the sampled tokens; 0 for padding."""
    known: Tensor
    """[B, T] bool: True for the tokens of an output, False for padding."""


def train_eagle(
    layer: EagleLayer,
    answers: Sequence[Answer],
    *,
    epochs: int,
    seed: int,
    progress: Progress | None = None,
) -> list[float]:
    """Train the head on outputs, and return the mean loss of each epoch."""
    dice = torch.Generator().manual_seed(seed)
    learned = [answer for answer in answers if len(answer.token_ids) > 1]

    def losses() -> Iterator[tuple[Tensor, int]]:
        for batch in _batches(layer, learned, dice):
            yield _loss(layer, batch), 1

    batches = -(-len(learned) // ANSWERS_A_BATCH)
    return minimize(layer, losses, epochs=epochs, batches=batches, progress=progress, betas=_BETAS, clip_at=_CLIPPED_AT)


@torch.inference_mode()
def eagle_guesses(layer: EagleLayer, answer: Answer, steps: int) -> list[list[int]]:
    """Return the `steps` draft tokens after each token of an output, as a worker would propose them.

    The head's context has only the output's tokens, not those of the prompt.
    """
    batch, guessed = _batch(layer, [answer]), list[Tensor]()

    def tokens(step: int, states: Tensor) -> Tensor:
        if step == 0:
            return batch.tokens
        guessed.append(layer.guesses(states))
        return guessed[-1]

    guessed.append(layer.guesses(layer.chain(batch.states, tokens, steps)[-1]))
    draft_tokens: list[list[int]] = torch.stack([guess[0] for guess in guessed], dim=-1).tolist()
    return draft_tokens


def write_eagle(layer: EagleLayer, spec: ModelSpec, folder: Path, facts: dict[str, object]) -> None:
    """Write a folder for `--draft`, in bfloat16. Raises InvalidArgument if it exists.

    `facts` describe the training.
    """
    shape, rope = layer.sizes.shape, layer.sizes.rope
    rows = [shape.heads * shape.head_dim] + [shape.kv_heads * shape.head_dim] * 2
    q, k, v = layer.qkv.weight.split_with_sizes(rows)
    gate, up = layer.gate_up.weight.chunk(2)
    tensors = {
        "fc.weight": layer.fc.weight,
        "layers.0.self_attn.q_proj.weight": q,
        "layers.0.self_attn.k_proj.weight": k,
        "layers.0.self_attn.v_proj.weight": v,
        "layers.0.self_attn.o_proj.weight": layer.output.weight,
        "layers.0.post_attention_layernorm.weight": layer.norm,
        "layers.0.mlp.gate_proj.weight": gate,
        "layers.0.mlp.up_proj.weight": up,
        "layers.0.mlp.down_proj.weight": layer.down.weight,
    }
    stored = {name: tensor.detach().to(torch.bfloat16) for name, tensor in tensors.items()}
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": spec.hidden_size,
        "intermediate_size": layer.sizes.width,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_context,
        "rope_theta": rope.theta,
        "rms_norm_eps": layer.base.eps,
        "vocab_size": spec.vocab_size,
        "bias": False,
    }
    if layer.token_map is not None:
        own = torch.arange(len(layer.token_map), device=layer.token_map.device)
        stored["d2t"] = layer.token_map - own
        config["draft_vocab_size"] = len(layer.token_map)
    with FolderWriter(folder) as writer:
        writer.add(stored)
        writer.finish(config | {"tandem_training": facts}, folder, ())


def _batches(layer: EagleLayer, answers: Sequence[Answer], dice: torch.Generator) -> Iterator[_Batch]:
    order: list[int] = torch.randperm(len(answers), generator=dice).tolist()
    for first in range(0, len(order), ANSWERS_A_BATCH):
        yield _batch(layer, [answers[number] for number in order[first : first + ANSWERS_A_BATCH]])


def _batch(layer: EagleLayer, answers: Sequence[Answer]) -> _Batch:
    length, base = max(len(output.token_ids) for output in answers), layer.base
    states = torch.zeros(len(answers), length, base.projection.shape[1])
    tokens = torch.zeros(len(answers), length, dtype=torch.int64)
    known = torch.zeros(len(answers), length, dtype=torch.bool)
    for row, answer in enumerate(answers):
        end = len(answer.token_ids)
        states[row, :end], known[row, :end] = answer.hidden.float(), True
        tokens[row, :end] = torch.tensor(answer.token_ids)
    device = base.projection.device
    normed = rms_norm(states.to(device), states.shape[-1:], base.norm.float(), base.eps)
    return _Batch(normed, tokens.to(device), known.to(device))


def _loss(layer: EagleLayer, batch: _Batch) -> Tensor:
    """Return the mean loss over the positions whose next hidden state was recorded.

    The loss is the smooth L1 loss of the predicted hidden state plus `_CROSS_ENTROPY` times the cross-entropy of the
    logits.
    """
    predicted = layer.chain(batch.states, lambda *_: batch.tokens, 1)[0]
    taught = batch.known[:, 1:]
    guessed, wanted = predicted[:, :-1][taught], batch.states[:, 1:][taught]
    logits = linear(guessed, layer.projection).log_softmax(-1)
    entropy = -(linear(wanted, layer.projection).softmax(-1) * logits).sum(-1).mean()
    return smooth_l1_loss(guessed, wanted) + _CROSS_ENTROPY * entropy
