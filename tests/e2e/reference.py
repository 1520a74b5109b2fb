"""The reference answers of transformers, one prompt at a time, and the comparison of greedy tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

TIE = 1e-3
"""Two best logits of the reference that are closer than this are a tie: either token is right."""


@dataclass(frozen=True)
class Choices:
    """The reference's two best tokens at each position of an answer, given all tokens before it.

    The token with the best logit, the one with the second best, and the distance between the two logits.
    """

    best: tuple[int, ...]
    seconds: tuple[int, ...]
    gaps: tuple[float, ...]


Read = Callable[[tuple[int, ...], tuple[int, ...]], Choices]
"""Returns the choices at each position of an answer to a prompt."""


class Reference:
    """Reference answers of transformers in float32, with its eager attention and experts; cached by prompt and answer.

    Another implementation would leave out the caps and sinks of some families.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM

        # AutoModelForCausalLM finds only the multimodal class of this model type.
        classes = {"mistral4": Mistral4ForCausalLM}
        loader = classes.get(AutoConfig.from_pretrained(folder).model_type, AutoModelForCausalLM)
        self._model = loader.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self._read: dict[tuple[tuple[int, ...], tuple[int, ...]], Choices] = {}
        self._latest: tuple[object, torch.Tensor] = (), torch.empty(0)

    def __call__(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Choices:
        """Returns the choices at each position of `answer`, from one forward pass over prompt and answer.

        An answer that is `best` everywhere is what `generate` returns: each of its tokens is the greedy one after those
        before it.
        """
        if (prompt, answer) not in self._read:
            best = self._logits(prompt, answer).topk(2)
            self._read[prompt, answer] = Choices(
                tuple(best.indices[:, 0].tolist()),
                tuple(best.indices[:, 1].tolist()),
                tuple((best.values[:, 0] - best.values[:, 1]).tolist()),
            )
        return self._read[prompt, answer]

    def generate(self, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """Returns the greedy continuation that transformers generates, token by token."""
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return tuple(out[0, len(prompt) :].tolist())

    def logprobs(self, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
        """Returns the log softmax [tokens, vocab] at each token of an answer."""
        return self._logits(prompt, tokens).log_softmax(-1)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns the logits [tokens, vocab] after each token."""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([[*token_ids]])).logits[0]
        return logits

    def _logits(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
        """Returns the logits [tokens, vocab] at each token of an answer; those of the latest one are kept."""
        if self._latest[0] != (prompt, answer):
            with torch.inference_mode():
                out = self._model(torch.tensor([[*prompt, *answer]]), logits_to_keep=len(answer) + 1)
            self._latest = (prompt, answer), out.logits[0, :-1]
        return self._latest[1]

    def penalized(
        self,
        prompt: tuple[int, ...],
        tokens: int,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
    ) -> tuple[int, ...]:
        """Returns the greedy continuation under penalties, which are recomputed at each token."""
        answer: list[int] = []
        new, past = list(prompt), None
        for _ in range(tokens):
            with torch.inference_mode():
                out = self._model(torch.tensor([new]), past_key_values=past, use_cache=True, logits_to_keep=1)
                logits, past = out.logits[0, -1], out.past_key_values
                for token in {*prompt, *answer}:
                    logits[token] *= 1 / repetition_penalty if logits[token] > 0 else repetition_penalty
                for token in set(answer):
                    logits[token] -= frequency_penalty * answer.count(token) + presence_penalty
            new = [int(logits.argmax())]
            answer += new
        return tuple(answer)


def compare(prompt: tuple[int, ...], answer: Sequence[int], reference: Read) -> list[str]:
    """Asserts that `answer` is the reference's greedy one; returns a line for each tie that went the other way.

    After a tie the two texts diverge, so the rest is compared with what the reference generates after that token.
    """
    ties: list[str] = []
    choices = reference(prompt, tuple(answer))
    for number, (token, best, second, gap) in enumerate(
        zip(answer, choices.best, choices.seconds, choices.gaps, strict=True)
    ):
        if token == best:
            continue
        where = f"prompt of {len(prompt)} tokens, token {number}"
        assert gap < TIE, f"{where}: {token}, not {best}"
        assert token == second, f"{where}: {token} is neither of the two best"
        ties.append(f"tie: {where}: the two best logits lie {gap:.1e} apart")
    return ties
