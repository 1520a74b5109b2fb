"""A model with constructed weights that calls the first tool that it knows, and repeats a word of the tool's result.

The model is a Llama of one layer. Each head finds one token anywhere in the context: the name of a tool in the list of
tools, the beginning of a tool's result, or the word that the result should have. The last token and what the heads
found determine the next token, so that the answer proves that prompt and result were read:

    the word is in the context        → "It is WORD."
    a result without the word         → "The result does not say it."
    a known tool, and no result       → a call of that tool
    none of these                     → "Hello."
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from router.text.chat_template_files import read_template
from tandem.engine.weights.safetensors_file import write_float32
from tests.factories import FAMILIES, random_weights

HELLO, SILENT = "Hello.", "The result does not say it."
_RESULT = "<tool_response>"
_CALL = "<tool_call>\n{"
_HEAD_DIM = 16
_SLOWEST = 7
"""The dimension of a head that RoPE rotates least: by 1e-5 over the longest context."""
_ROPE_THETA = 1e12
_FOUND = 5.0
"""Scale of the keys: a token that a head searches for gets e^80 times the attention weight of any other token."""
_PIECE_CHARS = 12


def write_tool_calling_model(
    folder: Path, tokenizer: Path, calls: Mapping[str, Mapping[str, Any]], word: str, *, context: int
) -> Path:
    """Write the model into `folder`; `calls` has the arguments of the call of each tool, by the tool's name.

    `tokenizer` is the folder of SmolLM2's tokenizer, which is copied with additional tokens; `context` is in tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = _Chains(Tokenizer.from_file(str(tokenizer / "tokenizer.json")), calls, word)
    made.tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    settings["chat_template"] = read_template("smollm2", tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text((tokenizer / "generation_config.json").read_text())
    heads = len(made.features)
    width = -(-(1 + len(made.known) + heads) // _HEAD_DIM) * _HEAD_DIM
    config = FAMILIES["llama2"] | {
        "vocab_size": made.tokenizer.get_vocab_size(with_added_tokens=True),
        "hidden_size": width,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": context,
        "rope_theta": _ROPE_THETA,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.zeros_like(tensor) for name, tensor in random_weights(config).items()}
    made.fill(tensors, width)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_float32(folder / "model.safetensors", shapes, tensors.values())
    return folder


class _Chains:
    """The tokens of all answers, each of which has one fixed successor, and the tokens that heads look for."""

    def __init__(self, tokenizer: Tokenizer, calls: Mapping[str, Mapping[str, Any]], word: str) -> None:
        self.tokenizer = tokenizer
        tokenizer.add_special_tokens([AddedToken(_RESULT, special=True, normalized=False)])
        self._begin = self._only("\n")
        self._eos = self._only("<|im_end|>")
        self._next: dict[int, int] = {}
        self._used: set[str] = set()
        self.known: dict[int, int] = {}
        """The dimension of the hidden state assigned to each token that has one."""
        self._dim(self._begin)
        self._call, self._word = self._added(_CALL), self._added(word)
        self._result = self._only(_RESULT)
        self._names = [self._added(f'"name": {json.dumps(name)}') for name in calls]
        for name, arguments in zip(self._names, calls.values(), strict=True):
            self._chain(name, f', "arguments": {json.dumps(arguments)}}}\n</tool_call>')
        self._answer = self._chain(None, "It is ", self._word)
        self._next[self._word] = self._eos
        self._silent, self._hello = self._chain(None, SILENT), self._chain(None, HELLO)
        self.features = [self._word, self._result, *self._names]
        """The tokens that heads look for."""
        for token in (*self.features, self._call):
            self._dim(token)

    def fill(self, tensors: Mapping[str, np.ndarray], width: int) -> None:
        """Set the weights that are not zero."""
        embedding, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
        embedding[:, 0] = 1.0
        for token, dim in self.known.items():
            embedding[token, dim] = 1.0
        for tensor_name, tensor in tensors.items():
            if tensor_name.endswith("norm.weight"):
                tensor[:] = 1.0
        attention = "model.layers.0.self_attn"
        dimension_of = {token: width - 1 - head for head, token in enumerate(self.features)}
        for head, token in enumerate(self.features):
            row = head * _HEAD_DIM
            tensors[f"{attention}.q_proj.weight"][row + _SLOWEST, 0] = 1.0
            tensors[f"{attention}.k_proj.weight"][row + _SLOWEST, self.known[token]] = _FOUND
            tensors[f"{attention}.v_proj.weight"][row, self.known[token]] = 0.125
            tensors[f"{attention}.o_proj.weight"][dimension_of[token], row] = 1.0
        for token, following in self._next.items():
            output[following, self.known[token]] += 400.0
        output[self._answer, dimension_of[self._word]] += 120.0
        output[self._silent, dimension_of[self._result]] += 80.0
        for name in self._names:
            output[self._call, dimension_of[name]] += 40.0
            output[name, self.known[self._call]] += 400.0
            output[name, dimension_of[name]] += 20.0
        output[self._hello, self.known[self._begin]] += 20.0

    def _chain(self, before: int | None, text: str, last: int | None = None) -> int:
        """Add the tokens of a text after the token `before`, and return the first one.

        The text is followed by `last`, or by the end of the answer.
        """
        tokens = [self._added(piece) for piece in self._pieces(text)]
        line = [*([] if before is None else [before]), *tokens, self._eos if last is None else last]
        for token, following in itertools.pairwise(line):
            self._dim(token)
            self._next[token] = following
        return tokens[0]

    def _pieces(self, text: str) -> list[str]:
        """Split a text into pieces that occur in no other answer, because each token has only one successor."""
        pieces = [""]
        for char in text:
            if len(pieces[-1]) >= _PIECE_CHARS and pieces[-1] not in self._used:
                self._used.add(pieces[-1])
                pieces.append("")
            pieces[-1] += char
        if pieces[-1] in self._used or len(pieces[-1]) < _PIECE_CHARS:
            pieces[-2:] = ["".join(pieces[-2:])]
        self._used.add(pieces[-1])
        return pieces

    def _added(self, text: str) -> int:
        self.tokenizer.add_tokens([AddedToken(text, special=False, normalized=False)])
        return self._only(text)

    def _only(self, text: str) -> int:
        """Return the single token of a text."""
        (token,) = self.tokenizer.encode(text, add_special_tokens=False).ids
        return int(token)

    def _dim(self, token: int) -> int:
        return self.known.setdefault(token, 1 + len(self.known))
