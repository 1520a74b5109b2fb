"""The three sets of prompts in `texts/`, each file with its licence; `texts/LICENSE-PSF.txt` is that of two of them."""

import json
from pathlib import Path

from router.text.chat_template import ChatTurn
from router.text.tokenizer import Tokenizer

SETS = ("copying", "code", "chat")
"""Passages to repeat or edit, functions to complete, test or rewrite, and questions; 48 prompts each."""
TEXTS = Path(__file__).parent / "texts"


def read_prompts(name: str) -> list[str]:
    """Return the prompts of one of `SETS`."""
    found = json.loads((TEXTS / f"{name}.json").read_text(encoding="utf-8"))
    return [each["prompt"] for each in found["prompts"]]


def encode_prompts(tokenizer: Tokenizer, name: str) -> list[list[int]]:
    """Return the token ids of the prompts of one of `SETS`, each as the only turn of a conversation."""
    return [tokenizer.encode_chat([ChatTurn("user", prompt)]) for prompt in read_prompts(name)]
