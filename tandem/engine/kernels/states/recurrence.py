"""The recurrences of state layers in plain PyTorch, computed in chunks of tokens.

A head's state S [K, V] follows S_t = a_t·S_{t-1} + k_t·u_tᵀ, and its output is o_t = S_tᵀ·q_t. Without the delta rule
u_t = v_t (Mamba-2, arXiv:2405.21060); with it u_t = b_t·(v_t - a_t·S_{t-1}ᵀ·k_t) (Gated DeltaNet, arXiv:2412.06464).
In Kimi Delta Attention (arXiv:2510.26692) a_t is a diagonal matrix: each of the K key channels has its own decay.
B is the number of rows, L of tokens per row, N of heads.
"""

import torch
from torch import Tensor

_CHUNK = 64
"""The number of tokens that are computed together; the products within a chunk have _CHUNK² elements per head."""
_CHANNEL_CHUNK = 16
"""The same for decays of channels, whose products have K times as many elements."""


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, step: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, N, L, V] and the states [B, N, K, V] after the last tokens.

    q and k are [B, N, L, K], v is [B, N, L, V], step is [B, N, L], log_decay is [B, N, L, 1], or [B, N, L, K] with a
    decay for each channel, and `state` is the state before the first tokens. step = None computes without the delta
    rule.
    """
    outputs = []
    chunk = _CHUNK if log_decay.shape[-1] == 1 else _CHANNEL_CHUNK
    for start in range(0, q.shape[2], chunk):
        span = slice(start, start + chunk)
        part = None if step is None else step[:, :, span]
        out, state = _chunk(q[:, :, span], k[:, :, span], v[:, :, span], log_decay[:, :, span], part, state)
        outputs.append(out)
    return torch.cat(outputs, 2), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, step: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    total = log_decay.cumsum(2)
    # Differences above the diagonal are masked before exp, because they may overflow there.
    between = (total.unsqueeze(3) - total.unsqueeze(2)).movedim(-1, 0).tril().exp().tril()
    since_start = total.exp()
    added = v
    if step is not None:
        # u = b·(v - aᵢ·kᵢᵀ·S) - Σ over j < i of bᵢ·aᵢⱼ·(kᵢ·kⱼ)·uⱼ, which is a triangular system for u.
        lower = (step.unsqueeze(-1) * _decayed(k, k, between)).tril(-1)
        right = step.unsqueeze(-1) * (v - (since_start * k) @ state)
        added = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    out = (since_start * q) @ state + _decayed(q, k, between) @ added
    to_end = (total[:, :, -1:] - total).exp()
    return out, since_start[:, :, -1:].mT * state + (k * to_end).mT @ added


def _decayed(x: Tensor, k: Tensor, between: Tensor) -> Tensor:
    """Return Σ over channels of xᵢ·kⱼ·betweenᵢⱼ [B, N, L, L], with between [1 or K, B, N, L, L]."""
    if len(between) == 1:
        return between[0] * (x @ k.mT)
    return torch.einsum("bnik,kbnij,bnjk->bnij", x, between, k)
