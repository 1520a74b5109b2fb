"""The recurrences of state layers in plain PyTorch, computed in chunks of tokens.

A head's state S [K, V] follows S_t = a_t·S_{t-1} + k_t·u_tᵀ, and its output is o_t = S_tᵀ·q_t. Without the delta rule
u_t = v_t (Mamba-2, arXiv:2405.21060); with it u_t = b_t·(v_t - a_t·S_{t-1}ᵀ·k_t) (Gated DeltaNet, arXiv:2412.06464).
B is the number of rows, L of tokens per row, N of heads.
"""

import torch
from torch import Tensor

_CHUNK = 64
"""The number of tokens that are computed together; the products within a chunk have _CHUNK² elements per head."""


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, step: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [B, N, L, V] and the states [B, N, K, V] after the last tokens.

    q and k are [B, N, L, K], v is [B, N, L, V], log_decay and step are [B, N, L], and `state` is the state before the
    first tokens. step = None computes without the delta rule.
    """
    outputs = []
    for start in range(0, q.shape[2], _CHUNK):
        span = slice(start, start + _CHUNK)
        part = None if step is None else step[:, :, span]
        out, state = _chunk(q[:, :, span], k[:, :, span], v[:, :, span], log_decay[:, :, span], part, state)
        outputs.append(out)
    return torch.cat(outputs, 2), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, step: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    total = log_decay.cumsum(-1)
    # Differences above the diagonal are masked before exp, because they may overflow there.
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
    since_start = total.exp().unsqueeze(-1)
    added = v
    if step is not None:
        # u = b·(v - aᵢ·kᵢᵀ·S) - Σ over j < i of bᵢ·aᵢⱼ·(kᵢ·kⱼ)·uⱼ, which is a triangular system for u.
        lower = (step.unsqueeze(-1) * between * (k @ k.mT)).tril(-1)
        right = step.unsqueeze(-1) * (v - since_start * (k @ state))
        added = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    out = since_start * (q @ state) + (between * (q @ k.mT)) @ added
    to_end = (total[..., -1:] - total).exp().unsqueeze(-1)
    return out, total[..., -1, None, None].exp() * state + (k * to_end).mT @ added
