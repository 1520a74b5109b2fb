"""Trains Medusa heads (Medusa-1 of arXiv 2401.10774); the model's weights do not change.

Head h learns to predict the token h + 1 positions after the token that was sampled from a hidden state. Its layers
start as zeros, so that it initially predicts what the model's own projection gives for the state.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from tandem.engine.config.model import ModelSpec
from tandem.engine.draft_training.answers import Answer
from tandem.engine.draft_training.optimization import minimize
from tandem.engine.kernels.reference import rms_norm
from tandem.engine.quantizer.folder_writer import FolderWriter
from tandem.engine.speculation.heads.folder import TOKEN_MAP, layer_name, projection_name
from tandem.engine.weights.checkpoint import Progress

_IGNORED = -100
"""The target of positions without training: those after the end of an output, and tokens that heads cannot predict."""
TOKENS_A_BATCH = 512


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The sizes of Medusa heads."""

    heads: int
    layers: int
    vocabulary: int
    """The number of tokens that the heads can predict; the model's vocabulary size = all tokens."""


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The model's weights from which the training starts."""

    norm: Tensor
    """[H]: the weights of the final norm."""
    projection: Tensor
    """[V, H]: the projection to the vocabulary."""
    eps: float
    embedding: Tensor
    """[V, H]: the embedding of each token."""


class TrainedHeads(nn.Module):
    """Medusa heads in float32, during training."""

    def __init__(self, base: BaseWeights, sizes: HeadSizes, token_map: Tensor | None) -> None:
        """Initialize the heads from the model's weights; `token_map` is that of `MedusaHeads`."""
        super().__init__()
        rows = base.projection if token_map is None else base.projection[token_map]
        vocabulary, hidden = rows.shape
        self.base = base
        self.sizes = sizes
        self.token_map = token_map
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(sizes.layers)) for _ in range(sizes.heads)
        )
        self.projections = nn.ModuleList(nn.Linear(hidden, vocabulary, bias=False) for _ in range(sizes.heads))
        for layer in self.layers.modules():
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)
        for projection in self.projections:
            assert isinstance(projection, nn.Linear)
            projection.weight = nn.Parameter(rows.to(torch.float32, copy=True))
        self.to(rows.device)

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """Return the logits [tokens, V'] of each head from hidden states [tokens, H] before the final norm."""
        normed, logits = rms_norm(hidden.float(), self.base.norm.float(), self.base.eps), []
        for layers, projection in zip(self.layers, self.projections, strict=True):
            x = normed
            assert isinstance(layers, nn.ModuleList)
            for layer in layers:
                x = x + silu(layer(x))
            logits.append(projection(x))
        return logits

    @torch.inference_mode()
    def guess(self, hidden: Tensor) -> list[list[int]]:
        """Return the predicted tokens [tokens][heads] for hidden states [tokens, H]."""
        device, guessed = self.base.projection.device, []
        for first in range(0, len(hidden), TOKENS_A_BATCH):
            piece = hidden[first : first + TOKENS_A_BATCH].to(device)
            guesses = torch.stack([logits.argmax(-1) for logits in self(piece)], dim=1)
            guessed += (guesses if self.token_map is None else self.token_map[guesses]).tolist()
        return guessed


def frequent_tokens(answers: Sequence[Answer], vocabulary: int, model_vocabulary: int) -> Tensor | None:
    """Return the most frequent tokens in the outputs, [vocabulary] int64, ascending.

    Returns None if heads can predict all tokens. If the outputs have fewer different tokens, those with the smallest
    ids fill the rest.
    """
    if vocabulary >= model_vocabulary:
        return None
    counts = Counter(token for answer in answers for token in answer.token_ids)
    order = sorted(range(model_vocabulary), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(order[:vocabulary]))


def train_heads(
    heads: TrainedHeads, answers: Sequence[Answer], *, epochs: int, seed: int, progress: Progress | None = None
) -> list[float]:
    """Train the heads on outputs, and return the mean loss of each epoch.

    The loss is the sum of the heads' cross-entropies, in nats.
    """
    hidden, targets = _examples(heads, answers)
    dice = torch.Generator().manual_seed(seed)
    device = heads.base.projection.device

    def losses() -> Iterator[tuple[Tensor, int]]:
        for chosen in _shuffled(len(hidden), dice):
            wanted = targets[chosen].to(device)
            head_losses = [
                _loss(logits, wanted[:, head]) for head, logits in enumerate(heads(hidden[chosen].to(device)))
            ]
            yield torch.stack(head_losses).sum(), len(chosen)

    return minimize(heads, losses, epochs=epochs, batches=-(-len(hidden) // TOKENS_A_BATCH), progress=progress)


def write_heads(heads: TrainedHeads, spec: ModelSpec, folder: Path, facts: dict[str, object]) -> None:
    """Write a folder for `--draft`, in bfloat16. Raises InvalidArgument if it exists.

    `facts` describe the training.
    """
    sizes, tensors = heads.sizes, dict[str, Tensor]()
    for head, (layers, projection) in enumerate(zip(heads.layers, heads.projections, strict=True)):
        assert isinstance(layers, nn.ModuleList)
        assert isinstance(projection, nn.Linear)
        for number, layer in enumerate(layers):
            assert isinstance(layer, nn.Linear)
            tensors[layer_name(head, number, "weight")] = layer.weight.detach().to(torch.bfloat16)
            tensors[layer_name(head, number, "bias")] = layer.bias.detach().to(torch.bfloat16)
        tensors[projection_name(head, sizes.layers)] = projection.weight.detach().to(torch.bfloat16)
    config: dict[str, object] = {
        "model_type": "medusa",
        "medusa_num_heads": sizes.heads,
        "medusa_num_layers": sizes.layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
    }
    if heads.token_map is not None:
        tensors[TOKEN_MAP] = heads.token_map
        config["truncated_vocab_size"] = len(heads.token_map)
    with FolderWriter(folder) as writer:
        writer.add(tensors)
        writer.finish(config | {"tandem_training": facts}, folder, ())


def _examples(heads: TrainedHeads, answers: Sequence[Answer]) -> tuple[Tensor, Tensor]:
    """Return the training data: the states [tokens, H], and the target token of each head [tokens, heads]."""
    count = heads.sizes.heads
    rows = torch.arange(heads.base.projection.shape[0])
    if heads.token_map is not None:
        rows = torch.full_like(rows, _IGNORED)
        rows[heads.token_map.cpu()] = torch.arange(len(heads.token_map))
    hidden, targets = [], []
    for answer in answers:
        known = len(answer.token_ids) - 1
        wanted = torch.full((known + count, count), _IGNORED)
        following = rows[torch.tensor(answer.token_ids[1:], dtype=torch.int64)]
        for head in range(count):
            wanted[: max(0, known - head), head] = following[head:]
        hidden.append(answer.hidden[:known])
        targets.append(wanted[:known])
    return torch.cat(hidden), torch.cat(targets)


def _shuffled(count: int, dice: torch.Generator) -> Iterator[Tensor]:
    order = torch.randperm(count, generator=dice)
    for first in range(0, count, TOKENS_A_BATCH):
        yield order[first : first + TOKENS_A_BATCH]


def _loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean cross-entropy over the positions with a target; 0 if there are none."""
    taught = (wanted != _IGNORED).sum().clamp(min=1)
    return cross_entropy(logits, wanted, ignore_index=_IGNORED, reduction="sum") / taught
