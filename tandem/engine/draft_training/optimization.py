"""The optimization loop that trains draft heads: Medusa heads and EAGLE heads."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from tandem.engine.weights.checkpoint import Progress

LEARNING_RATE = 1e-3
"""The initial learning rate, as published; it decays to zero along half a cosine."""


def minimize(
    heads: nn.Module,
    losses: Callable[[], Iterator[tuple[Tensor, int]]],
    *,
    epochs: int,
    batches: int,
    progress: Progress | None,
    betas: tuple[float, float] = (0.9, 0.999),
    clip_at: float | None = None,
) -> list[float]:
    """Train `heads` with AdamW, and return the mean loss of each epoch.

    In each epoch `losses` yields `batches` losses, each with its weight in the mean. `clip_at` is the maximum magnitude
    of a gradient element; None = unbounded.
    """
    optimizer = torch.optim.AdamW(heads.parameters(), LEARNING_RATE, betas=betas, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
    means = []
    for epoch in range(epochs):
        total, weights = 0.0, 0
        for done, (loss, weight) in enumerate(losses(), 1):
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            if clip_at is not None:
                torch.nn.utils.clip_grad_value_(heads.parameters(), clip_at)
            optimizer.step()
            schedule.step()
            total, weights = total + loss.item() * weight, weights + weight
            if progress is not None:
                progress("training heads", (epoch + done / batches) / epochs)
        means.append(total / weights)
    return means
