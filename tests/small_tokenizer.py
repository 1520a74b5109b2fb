"""A byte-level tokenizer of 500 tokens, the first three special: 2 ends answers."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TOKENS, EOS = 500, 2
TEXT = 'The quick brown fox jumps over the lazy dog. {"name": "Ann", "tags": ["a", "b"], "age": 31} naïve 你好 ' * 3


def save_tokenizer(folder: Path) -> None:
    inner: Any = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=["<s>", "<unk>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer)
    inner.save(str(folder / "tokenizer.json"))
