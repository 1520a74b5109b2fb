"""Small byte-level tokenizers whose first three tokens are special."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TOKENS, EOS = 500, 2
SPECIAL = ("<s>", "<unk>", "</s>")
TEXT = 'The quick brown fox jumps over the lazy dog. {"name": "Ann", "tags": ["a", "b"], "age": 31} naïve 你好 ' * 3


def save_tokenizer(
    folder: Path, tokens: int = TOKENS, special: Sequence[str] = SPECIAL, texts: Sequence[str] = (TEXT,)
) -> None:
    """Train a tokenizer of at most `tokens` tokens on `texts`, and save it as tokenizer.json in `folder`."""
    inner: Any = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tokens,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    inner.save(str(folder / "tokenizer.json"))
