"""Text to token ids and back, as the model's own tokenizer.json says, without transformers."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from router.chat_template import ChatTemplate, ChatTurn
from router.model_folder import read_json
from wire.errors import InvalidArgument, ModelError

_SPELLED_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""How tokenizers of SentencePiece's kind write a byte of a character they do not know."""
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + number): byte for number, byte in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))
}
"""Byte-level tokenizers write each byte as a visible character: itself, or the next one from U+0100 on."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A loaded tokenizer. Every method may be called from any thread; long texts let other threads run."""

    def __init__(self, folder: Path) -> None:
        """Read `folder`; `ModelError` in one sentence if it holds no usable tokenizer."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; convert the model's tokenizer to that format")
        try:
            self._inner: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises the bare class
            raise ModelError(f"{path} is no readable tokenizer ({error}); restore it from the source") from error
        self._inner.no_truncation()
        self._inner.no_padding()
        config = read_json(folder, "tokenizer_config.json")
        special = _special_tokens(folder, config)
        self._follow_bos_and_eos(config, special)
        self._added = {number: added.content for number, added in self._inner.get_added_tokens_decoder().items()}
        decoder = self._inner.decoder
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        source = _template_source(folder, config)
        self._template = None if source is None else ChatTemplate(source, special)
        self.vocab_size: int = self._inner.get_vocab_size(with_added_tokens=True)
        """Number of ids this tokenizer knows; the model's embedding may hold more."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the model's special tokens around it."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=True).ids
        return ids

    def encode_chat(self, turns: Sequence[ChatTurn]) -> list[int]:
        """Token ids of a conversation through the chat template, which brings its own special tokens."""
        if self._template is None:
            raise InvalidArgument("messages", "this model has no chat template; send a plain prompt instead")
        ids: list[int] = self._inner.encode(self._template.render(turns), add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out; unknown ids count as nothing."""
        text: str = self._inner.decode(ids, skip_special_tokens=True)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for in UTF-8, special ones included; b"" for an unknown id."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF[char] for char in token if char in _BYTE_OF)
        if _SPELLED_BYTE.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def _follow_bos_and_eos(self, config: dict[str, Any], special: dict[str, str]) -> None:
        """Let explicit add_bos_token / add_eos_token win over tokenizer.json's post-processor, as transformers does."""
        if "add_bos_token" not in config and "add_eos_token" not in config:
            return
        bos = special.get("bos_token") if config.get("add_bos_token") else None
        eos = special.get("eos_token") if config.get("add_eos_token") else None
        pieces = ([bos] if bos else []) + ["$A"] + ([eos] if eos else [])
        known = [(token, self._inner.token_to_id(token)) for token in (bos, eos) if token]
        self._inner.post_processor = TemplateProcessing(single=pieces, special_tokens=known)


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name to text of the special tokens; older folders keep them in special_tokens_map.json."""
    found: dict[str, str] = {}
    for source in (read_json(folder, "special_tokens_map.json"), config):
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _template_source(folder: Path, config: dict[str, Any]) -> str | None:
    """The chat template's text: chat_template.jinja, else tokenizer_config.json's (its "default" if it has several)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
