"""The model's tokenizer, which turns prompts into token ids and token ids into text."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from router.text.chat_template import NO_VARIABLES, ChatTemplate, ChatTurn, PromptEnd
from router.text.chat_template_files import DEFAULT, FOR_TOOLS, template_sources
from router.text.token_length import token_length
from tandem.protocol.errors import InvalidArgument
from tandem.tokenizers.model_folder import read_json
from tandem.tokenizers.tokenizer_formats import load_tokenizer

_SPELLED_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""The pattern of SentencePiece-style tokens that represent one byte of an unknown character."""
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(0x100 + number): byte for number, byte in enumerate(sorted({*range(0x100)} - {*_PRINTABLE}))
}
"""Maps the characters of byte-level tokenizers to bytes.

A printable byte is written as the same character, the other bytes as the characters from U+0100 on.
"""
_CHARS_PER_TOKEN = 6
"""Number of characters encoded per token to keep, in the first attempt; English has about four characters per token."""
_CUT_TOKENS = 256
"""Number of tokens dropped at a cut inside the text, because they may differ from the tokens of the whole text."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A loaded tokenizer with the model's chat templates. Thread-safe; encoding a long text does not hold the GIL."""

    def __init__(self, folder: Path, chat_template: str = "") -> None:
        """Load the tokenizer in `folder`. Raises ModelError if the folder has no usable tokenizer.

        `chat_template` is the source of a template that replaces the folder's templates; "" keeps them.
        """
        loaded = load_tokenizer(folder)
        self._inner: Any = loaded.inner
        self._inner.no_truncation()
        self._inner.no_padding()
        config = read_json(folder, "tokenizer_config.json")
        special = {**loaded.special_tokens, **_special_tokens(folder, config)}
        self._follow_bos_and_eos(config, special)
        added: dict[int, AddedToken] = self._inner.get_added_tokens_decoder()
        self._added = {number: token.content for number, token in added.items()}
        decoder = self._inner.decoder
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        sources = {DEFAULT: chat_template} if chat_template else template_sources(folder, config)
        source = sources.get(DEFAULT, loaded.chat_template)
        self._template = None if source is None else ChatTemplate(source, special)
        for_tools = sources.get(FOR_TOOLS)
        self._tool_template = self._template if for_tools is None else ChatTemplate(for_tools, special)
        self.template_source = for_tools or source or ""
        """The source of the chat template for conversations with tools; "" if there is none."""
        self._special = {token.content: number for number, token in added.items() if token.special}
        self.facts: Mapping[str, Any] = {
            "tokenizer_class": config.get("tokenizer_class"),
            "chat_template": source,
            **special,
        }
        """The tokenizer class from tokenizer_config.json, the chat template, and the special tokens by name."""
        self.vocab_size: int = self._inner.get_vocab_size(with_added_tokens=True)
        """Number of token ids of the tokenizer; the model's embedding may have more rows."""
        self._break_up([token.content for token in added.values() if token.special])
        mask = self._inner.encode("a").special_tokens_mask
        self._special_before = next((number for number, special in enumerate(mask) if not special), 0)
        self._length = token_length(self._inner, map(self.token_bytes, range(self.vocab_size)), _BYTE_OF)

    def encode(self, text: str, *, add_special_tokens: bool = True, last: int | None = None) -> list[int]:
        """Return the token ids of a plain prompt, with the model's special tokens around it if `add_special_tokens`.

        Special tokens inside the text are encoded as special tokens, because clients that render templates themselves
        send plain prompts. `last` is the maximum number of ids: tokens at the beginning of the text are dropped, but
        not the special tokens before the text. With `last`, only the end of a long text is encoded. The ids still equal
        the last ids of the whole text, because tokenizers merge only within words; an exception is a single word of
        more than `_CUT_TOKENS` tokens.
        """
        return self._encode_last(text, last, special=add_special_tokens)

    def encode_chat(self, turns: Sequence[ChatTurn], variables: Mapping[str, Any] = NO_VARIABLES) -> list[int]:
        """Return the token ids of a conversation, by `render_chat` and `encode_rendered`."""
        return self.encode_rendered(self.render_chat(turns, variables))

    def render_chat(
        self,
        turns: Sequence[ChatTurn],
        variables: Mapping[str, Any] = NO_VARIABLES,
        tools: Sequence[Mapping[str, Any]] = (),
        end: PromptEnd = PromptEnd.NEXT_TURN,
    ) -> str:
        """Render a conversation with the chat template, the client's `variables` and `tools`; the prompt ends at `end`.

        Only the template adds special tokens: the text of a special token in a turn, a variable or a tool is split into
        ordinary text, so that clients cannot forge turns. Raises InvalidArgument if the model has no template, or if
        the template rejects the conversation.
        """
        template = self._tool_template if tools else self._template
        if template is None:
            raise InvalidArgument("messages", "this model has no chat template; send a plain prompt instead")
        try:
            spelled = [
                replace(turn, content=self._as_text(turn.content), extras=self._all_as_text(dict(turn.extras)))
                for turn in turns
            ]
            offered = [self._all_as_text(dict(tool)) for tool in tools]
        except RecursionError:
            raise InvalidArgument("messages", "or tools are nested too deeply for the template") from None
        try:
            given = {name: self._all_as_text(value) for name, value in variables.items()}
        except RecursionError:
            raise InvalidArgument("chat_template_kwargs", "is nested too deeply for the template") from None
        return template.render(spelled, given, offered, end)

    def encode_rendered(self, text: str, *, add_special_tokens: bool = False, last: int | None = None) -> list[int]:
        """Return the token ids of a text from `render_chat`; only special tokens of the template are encoded as such.

        `add_special_tokens` and `last` are the same as in `encode`.
        """
        return self._encode_last(text, last, special=add_special_tokens)

    def fewest_tokens(self, text: str, enough: int) -> int:
        """Return a lower bound of the number of tokens of `text`; a bound of `enough` or more is not improved.

        If the bound from the number of bytes is below `enough`, longer and longer beginnings of a long text are encoded
        until the bound reaches `enough`.
        """
        least = self._length.fewest_tokens(text.replace(self._break, ""))
        chars = _CHARS_PER_TOKEN * (enough + _CUT_TOKENS)
        while least < enough and chars < len(text):
            least = max(least, len(self._encode(text[:chars], special=False)) - _CUT_TOKENS)
            chars *= 2
        return least

    def special_ids(self, texts: Sequence[str]) -> dict[int, str]:
        """Return those of `texts` that are special tokens, by token id."""
        return {self._special[text]: text for text in texts if text in self._special}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`; special tokens and unknown ids are left out."""
        text: str = self._inner.decode(ids, skip_special_tokens=True)
        return text

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` with special tokens; unknown ids are left out. Does not hold the GIL."""
        known = [i for i in ids if i != self._break_id]
        text: str = self._inner.decode_batch([known], skip_special_tokens=False)[0]
        return text

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """Return the tokenizer's own notation of each id, such as "Ġthe"; "" for an unknown id."""
        return [self._inner.id_to_token(i) or "" for i in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token, which may be a special token; b"" for an unknown id."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token: str | None = self._inner.id_to_token(token_id)
        if token is None or token_id == self._break_id:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF[char] for char in token if char in _BYTE_OF)
        if _SPELLED_BYTE.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def _encode_last(self, text: str, last: int | None, *, special: bool) -> list[int]:
        """Return the last `last` token ids of `text`; all ids if `last` is None.

        Encodes longer and longer ends of the text, at most twice as much text as necessary.
        """
        if last is None:
            return self._encode(text, special=special)
        chars = _CHARS_PER_TOKEN * (last + _CUT_TOKENS)
        while chars < len(text):
            ids = self._encode(text[-chars:], special=special)
            if len(ids) >= last + _CUT_TOKENS:
                return self._last(ids, last, special=special)
            chars *= 2
        return self._last(self._encode(text, special=special), last, special=special)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # The library's `encode` holds the GIL for its whole run, which would block the event loop.
        (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return [i for i in ids if i != self._break_id] if self._break in text else ids

    def _last(self, ids: list[int], count: int | None, *, special: bool) -> list[int]:
        """Return the last `count` ids (None = all); with `special`, keep the special tokens before the text."""
        if count is None or len(ids) <= count:
            return ids
        kept = min(self._special_before if special else 0, count)
        return ids[:kept] + ids[len(ids) - (count - kept) :]

    def _break_up(self, special: list[str]) -> None:
        """Add a separator token, which splits the text around it into separate tokens and is removed after encoding.

        Its text is random digits, which filters of templates do not change and clients cannot guess.
        """
        self._break = f"{secrets.randbelow(10**20):020d}"
        self._inner.add_special_tokens([AddedToken(self._break, normalized=False)])
        self._break_id: int = self._inner.token_to_id(self._break)
        self._begins_special = re.compile(_first_characters_of(special))

    def _as_text(self, text: str) -> str:
        """Return `text` with a separator after the first character of each special token, which makes it plain text."""
        return self._begins_special.sub(lambda match: match.group() + self._break, text)

    def _all_as_text(self, value: Any) -> Any:
        """Return the JSON value `value` with `_as_text` applied to each of its strings."""
        if isinstance(value, str):
            return self._as_text(value)
        if isinstance(value, list):
            return [self._all_as_text(item) for item in value]
        if isinstance(value, dict):
            return {self._as_text(name): self._all_as_text(item) for name, item in value.items()}
        return value

    def _follow_bos_and_eos(self, config: dict[str, Any], special: dict[str, str]) -> None:
        """Let add_bos_token and add_eos_token, if set, replace tokenizer.json's post-processor, as in transformers."""
        if "add_bos_token" not in config and "add_eos_token" not in config:
            return
        bos = special.get("bos_token") if config.get("add_bos_token") else None
        eos = special.get("eos_token") if config.get("add_eos_token") else None
        pieces = ([bos] if bos else []) + ["$A"] + ([eos] if eos else [])
        known = [(token, self._inner.token_to_id(token)) for token in (bos, eos) if token]
        self._inner.post_processor = TemplateProcessing(single=pieces, special_tokens=known)


def _first_characters_of(texts: Sequence[str]) -> str:
    """Return a pattern that matches the first character of each occurrence of one of `texts`.

    The pattern is a trie, so that each character is read about once. This matters because some models have a thousand
    special tokens, and a search holds the GIL.
    """
    patterns = (f"{re.escape(first)}(?={_any_of(rests)})" for first, rests in _by_first(texts).items())
    return "|".join(patterns) or "(?!)"


def _any_of(texts: Sequence[str]) -> str:
    """Return a pattern that matches any of `texts`."""
    if "" in texts:
        return ""
    patterns = [re.escape(first) + _any_of(rests) for first, rests in _by_first(texts).items()]
    return patterns[0] if len(patterns) == 1 else f"(?:{'|'.join(patterns)})"


def _by_first(texts: Sequence[str]) -> dict[str, list[str]]:
    """Group `texts` by their first character; the values are the texts without that character."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    return rests


def _special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens by name; older folders define them in special_tokens_map.json."""
    special_tokens: dict[str, str] = {}
    for source in (read_json(folder, "special_tokens_map.json"), config):
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                special_tokens[name] = text
    return special_tokens
