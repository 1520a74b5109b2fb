"""The yardstick: transformers' own greedy generation, one prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

NEW_TOKENS = 64
PROMPT_LENGTHS = (
    5,
    7,
    15,
    16,
    17,
    23,
    31,
    33,
    48,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    200,
    255,
    300,
    511,
    513,
    700,
    1025,
    1500,
)
"""Around every page and chunk edge, 24 of them."""


@dataclass(frozen=True)
class Expected:
    """Greedy continuation of one prompt; `gaps[i]` is the distance of the two best logits at token i."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


@pytest.fixture(scope="session")
def prompts(model_folder: Path) -> list[tuple[int, ...]]:
    """Real English of exact token lengths, each prompt from another place."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    text = "\n".join(topics[key] for key in sorted(topics))
    ids = Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode(text[:400_000]).ids
    starts = [1_000 + 2_111 * i for i in range(len(PROMPT_LENGTHS))]
    return [tuple(ids[s : s + n]) for s, n in zip(starts, PROMPT_LENGTHS, strict=True)]


@pytest.fixture(scope="session")
def expected(model_folder: Path, prompts: list[tuple[int, ...]]) -> list[Expected]:
    """transformers' `generate` in float32 for each prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    return [_generate(model, prompt) for prompt in prompts]


def _generate(model: torch.nn.Module, prompt: tuple[int, ...]) -> Expected:
    ids = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack([logits[0].topk(2).values for logits in out.logits])
    return Expected(prompt, tuple(out.sequences[0, len(prompt) :].tolist()), tuple((best[:, 0] - best[:, 1]).tolist()))
