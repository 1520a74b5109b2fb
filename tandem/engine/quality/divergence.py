"""Measures how much two models' predictions of the same tokens differ."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Divergence:
    """The difference of a candidate model from a reference model over `positions` predictions of known tokens."""

    positions: int
    kl: float
    """The mean of KL(reference ‖ candidate) of the distributions of the next token, in nats."""
    kl_error: float
    """The standard error of `kl`, assuming that positions are independent."""
    top1: float
    """The fraction of positions at which both models have the same most likely token."""
    reference_perplexity: float
    """The reference's perplexity: exp of the mean negative log probability of the text's next token."""
    candidate_perplexity: float

    @property
    def perplexity_change(self) -> float:
        """The relative change of perplexity: the candidate's divided by the reference's, minus 1."""
        return self.candidate_perplexity / self.reference_perplexity - 1


class DivergenceSum:
    """Accumulates the measures of `Divergence` over positions, in float64."""

    def __init__(self) -> None:
        self._positions = 0
        self._sums = torch.zeros(5, dtype=torch.float64)

    def add(self, reference: Tensor, candidate: Tensor, following: Tensor) -> None:
        """Add T positions, given by the logits [T, vocab] of both models and the next tokens [T] int64 of the text.

        The tensors may be on different devices; the computation runs on that of the reference's logits.
        """
        device = reference.device
        following = following.to(device)
        p, q = (logits.to(device).float().log_softmax(-1) for logits in (reference, candidate))
        kl = ((p - q) * p.exp()).sum(-1, dtype=torch.float64)
        same = p.argmax(-1) == q.argmax(-1)
        nll = [-logs.gather(1, following[:, None]).double().sum() for logs in (p, q)]
        self._positions += len(kl)
        self._sums += torch.stack([kl.sum(), kl.square().sum(), same.double().sum(), *nll]).cpu()

    def result(self) -> Divergence:
        """Return the measures over all positions added so far; there must be at least one."""
        count = self._positions
        kl, squares, same, reference, candidate = (self._sums / count).tolist()
        return Divergence(
            positions=count,
            kl=kl,
            kl_error=math.sqrt(max(squares - kl * kl, 0.0) / count),
            top1=same,
            reference_perplexity=math.exp(reference),
            candidate_perplexity=math.exp(candidate),
        )
