"""Loads the tokenizer of a model folder, in any published format, as a `tokenizers.Tokenizer`.

`tokenizer.json` is read directly. Transformers converts the other formats: Mistral's tekken.json, SentencePiece models
and tiktoken's files of ranks. No code in the folder is executed.
"""

import ast
import base64
import binascii
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from tandem.protocol.errors import ModelError
from tandem.tokenizers.model_folder import read_json

_RANK = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n?")
"""A line of a tiktoken file: a token's bytes in base64, and its rank, which is its id."""
_SENTENCEPIECE_CLASS = "LlamaTokenizer"
"""The transformers class that reads a SentencePiece model if the folder names no tokenizer class."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer, and the special tokens and chat template that its file defines."""

    inner: Any
    """The tokenizer itself, a `tokenizers.Tokenizer`."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by their names in tokenizer_config.json.

    A token that tokenizer_config.json itself defines takes precedence over that of the tokenizer file.
    """
    chat_template: str | None = None
    """The chat template in the tokenizer file; it is used only if the folder has no other template."""


def has_tokenizer(folder: Path) -> bool:
    """Return True if `folder` has a tokenizer file in any format."""
    return any(any(folder.glob(name)) for name in _FORMATS)


def load_tokenizer(folder: Path) -> LoadedTokenizer:
    """Load the tokenizer in `folder` from the first format that is found.

    Raises ModelError if the folder has no tokenizer, if the file is damaged, or if its format needs a library that is
    not installed.
    """
    for name, load in _FORMATS.items():
        for path in sorted(folder.glob(name)):
            try:
                return load(path)
            except ModelError:
                raise
            except Exception as error:  # libraries raise the bare class, and any part may fail on a foreign file
                reason = " ".join(str(error).split())
                raise ModelError(f"{path} is no readable tokenizer ({reason}); restore it from the source") from error
    names = list(_FORMATS)
    raise ModelError(f"{folder} has no tokenizer: none of {', '.join(names[:-1])} and {names[-1]} is there")


def _load_json(path: Path) -> LoadedTokenizer:
    return LoadedTokenizer(tokenizers.Tokenizer.from_file(str(path)))


def _load_tekken(path: Path) -> LoadedTokenizer:
    """Read Mistral's tekken.json; prompts without a chat template begin with `<s>`, as in mistral-common."""
    if "special_tokens" not in read_json(path.parent, path.name):
        _require("mistral_common", path)  # files of its first version leave the special tokens to the library
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    converted: Any = convert_tekken_tokenizer(str(path))
    inner = converted.backend_tokenizer
    bos = converted.bos_token
    inner.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, inner.token_to_id(bos))])
    return _loaded(converted)


def _load_model(path: Path) -> LoadedTokenizer:
    """Read tokenizer.model, which has tiktoken's or SentencePiece's format."""
    with path.open("rb") as stream:
        first = stream.readline(1 << 12)
    return _load_tiktoken(path) if _RANK.fullmatch(first) else _load_sentencepiece(path)


def _load_sentencepiece(path: Path) -> LoadedTokenizer:
    _require("sentencepiece", path)
    import transformers
    from transformers import PreTrainedTokenizerFast

    config = read_json(path.parent, "tokenizer_config.json")
    name = str(config.get("tokenizer_class") or _SENTENCEPIECE_CLASS).removesuffix("Fast")
    kind = getattr(transformers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerFast)):
        raise ModelError(
            f"{path.parent / 'tokenizer_config.json'} names the class {name}, which transformers cannot convert; "
            "save the tokenizer as tokenizer.json"
        )
    tokenizer_class: Any = kind
    return _loaded(tokenizer_class.from_pretrained(str(path.parent), local_files_only=True))


def _load_tiktoken(path: Path) -> LoadedTokenizer:
    """Read a tiktoken file of ranks; the special tokens come from `added_tokens_decoder` in tokenizer_config.json."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ranks = _read_ranks(path)

    class Converter(TikTokenConverter):  # type: ignore[misc]  # transformers has no types
        """A converter that uses `ranks`; tiktoken's own reader would copy the file to a shared folder."""

        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks

    config = read_json(path.parent, "tokenizer_config.json")
    pattern = _split_pattern(path, config)
    converter = Converter(str(path), **({} if pattern is None else {"pattern": pattern}))
    inner = converter.converted()
    inner.add_special_tokens(_added_tokens(config, max(ranks.values()) + 1))
    return LoadedTokenizer(inner)


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ModelError(f"{path}, line {number}: no token and rank; restore it from the source") from None
    return ranks


def _added_tokens(config: Mapping[str, Any], first: int) -> list[str]:
    """Return the texts of the added tokens, in the order of their ids, which start at `first`.

    Ids without a text get a reserved name.
    """
    named = {int(number): token["content"] for number, token in config.get("added_tokens_decoder", {}).items()}
    return [named.get(number, f"<|reserved_token_{number}|>") for number in range(first, max(named, default=-1) + 1)]


def _split_pattern(path: Path, config: Mapping[str, Any]) -> str | None:
    """Return the regular expression that splits text before tokens are merged; None = Llama 3's, transformers' default.

    If the model has a custom tokenizer class, that class's file defines the expression, as a literal named `pat_str`.
    """
    files = sorted(path.parent.glob("tokenization_*.py"))
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(target, ast.Name) and target.id.lower() == "pat_str" for target in targets):
                return _literal(node.value)  # type: ignore[attr-defined]  # an Assign has targets
    if files or "auto_map" in config:
        raise ModelError(
            f"{path} needs the pattern of the folder's own tokenizer class, which is not found in tokenization_*.py; "
            "save the tokenizer as tokenizer.json"
        )
    return None


def _literal(node: ast.expr) -> str:
    """Return the value of a string literal, or of a call of `join` on a list of string literals.

    Raises ValueError for any other expression.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
        between, parts = ast.literal_eval(node.func.value), ast.literal_eval(node.args[0])
        return str(between).join(parts)
    return str(ast.literal_eval(node))


def _loaded(converted: Any) -> LoadedTokenizer:
    """Convert a tokenizer object of transformers to a `LoadedTokenizer`."""
    special = {name: text for name in _SPECIAL_NAMES if (text := getattr(converted, name, None)) is not None}
    template = converted.chat_template
    return LoadedTokenizer(converted.backend_tokenizer, special, template if isinstance(template, str) else None)


def _require(library: str, path: Path) -> None:
    """Raise ModelError if the library that reads `path` is not installed."""
    if importlib.util.find_spec(library) is None:
        package = library.replace("_", "-")
        raise ModelError(
            f"{path} is read with {package}, which is not installed; run `pip install {package}`, or add the model's "
            "tokenizer.json to the folder"
        )


_FORMATS: dict[str, Callable[[Path], LoadedTokenizer]] = {
    "tokenizer.json": _load_json,
    "tekken.json": _load_tekken,
    "tokenizer.model": _load_model,
    "tiktoken.model": _load_tiktoken,
    "*.tiktoken": _load_tiktoken,
}
"""The loader of each file name; the files are looked for in this order."""
