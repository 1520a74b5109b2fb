"""The yardstick: transformers' own greedy generation, one prompt at a time, and what counts as the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

TIE = 1e-3
"""Two best logits of the reference closer than this may be taken in either order."""


@dataclass(frozen=True)
class Expected:
    """Greedy continuation of one prompt; `seconds[i]` is the token with the second best logit at token i, and
    `gaps[i]` the distance of the two."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[int, ...]
    gaps: tuple[float, ...]


Continue = Callable[[tuple[int, ...], int], Expected]
"""Continues a prompt greedily by so many tokens."""


class Reference:
    """transformers in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(self, prompt: tuple[int, ...], tokens: int) -> Expected:
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [logits[0].topk(2) for logits in out.logits]
        return Expected(
            prompt,
            tuple(out.sequences[0, len(prompt) :].tolist()),
            tuple(int(two.indices[1]) for two in best),
            tuple(float(two.values[0] - two.values[1]) for two in best),
        )

    def logprobs(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
        """Log softmax [tokens, vocab] at each token of an answer."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *tokens]])).logits[0]
        return logits[len(prompt) - 1 : -1].log_softmax(-1)

    def penalized(
        self,
        prompt: tuple[int, ...],
        tokens: int,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
    ) -> tuple[int, ...]:
        """Greedy continuation under penalties, counted anew at each token."""
        answer: list[int] = []
        for _ in range(tokens):
            with torch.inference_mode():
                logits = self._model(torch.tensor([[*prompt, *answer]])).logits[0, -1]
                for token in {*prompt, *answer}:
                    logits[token] *= 1 / repetition_penalty if logits[token] > 0 else repetition_penalty
                for token in set(answer):
                    logits[token] -= frequency_penalty * answer.count(token) + presence_penalty
            answer.append(int(logits.argmax()))
        return tuple(answer)


def compare(tokens: list[int], expected: Expected, reference: Continue) -> list[str]:
    """Assert that `tokens` are the reference's; return a line for each tie that went the other way.

    After a tie two texts go on differently, so the rest is held against the reference continued from `tokens`.
    """
    ties: list[str] = []
    prompt, want, start = expected.prompt, expected, 0
    assert len(tokens) == len(expected.tokens), f"prompt of {len(prompt)} tokens"
    while True:
        rest = tokens[start:]
        at = next((i for i, (got, token) in enumerate(zip(rest, want.tokens, strict=True)) if got != token), None)
        if at is None:
            return ties
        where = f"prompt of {len(prompt)} tokens, token {start + at}"
        assert want.gaps[at] < TIE, f"{where}: {rest[at]}, not {want.tokens[at]}"
        assert rest[at] == want.seconds[at], f"{where}: {rest[at]} is neither of the two best"
        ties.append(f"tie: {where}: the two best logits lie {want.gaps[at]:.1e} apart")
        start += at + 1
        if start == len(tokens):
            return ties
        want = reference((*prompt, *tokens[:start]), len(tokens) - start)
