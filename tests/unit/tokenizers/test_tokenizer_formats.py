"""Tokenizers as published: tekken.json, SentencePiece, tiktoken; what each needs, and their streams of text."""

import base64
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.text.chat_template import ChatTurn
from router.text.detokenizer import Detokenizer
from router.text.tokenizer import Tokenizer
from tandem.protocol.errors import ModelError
from tandem.tokenizers import tokenizer_formats
from tests.soak import examples

WORDS = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world", "你".encode()]
RANKS = {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + [b"\xe4\xbd", *WORDS])}
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
TURNS = [ChatTurn("user", "hello")]


def write_tekken(folder: Path, *, old: bool = False) -> Path:
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in RANKS.items()
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(RANKS),
        "default_vocab_size": len(RANKS) + 10,
        "default_num_special_tokens": 10,
        "version": "v3",
    }
    parts = {"config": config, "vocab": vocabulary} | ({} if old else {"special_tokens": special})
    (folder / "tekken.json").write_text(json.dumps(parts))
    return folder


def write_tiktoken(folder: Path, name: str = "tiktoken.model") -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in RANKS.items()]
    (folder / name).write_text("".join(lines))
    first = len(RANKS)
    added = {str(first): {"content": "[BOS]"}, str(first + 2): {"content": "<|im_end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "bos_token": "[BOS]"}))
    return folder


def write_sentencepiece(folder: Path, **config: object) -> Path:
    """A model of Llama's kind: pieces with scores, and a piece for each byte."""
    from transformers.utils import sentencepiece_model_pb2_new as schema

    made = schema.ModelProto()
    kinds = [("<unk>", 2), ("<s>", 3), ("</s>", 3), *((f"<0x{byte:02X}>", 6) for byte in range(256))]
    letters = list("▁helowrd!")
    merged = ["he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld", "▁world"]
    for number, (piece, kind) in enumerate([*kinds, *((word, 1) for word in merged + letters)]):
        made.pieces.add(piece=piece, type=kind, score=-float(number) if kind == 1 else 0.0)
    made.trainer_spec.model_type = 2
    made.trainer_spec.byte_fallback = True
    (folder / "tokenizer.model").write_bytes(made.SerializeToString())
    settings_ = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_ | {"unk_token": "<unk>"} | config))
    return folder


@pytest.fixture
def sentencepiece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers asks for the library and reads the file with protobuf alone; so the tests can do without it."""
    # transformers has a function of this name as well, which takes its place once something imports it.
    convert_slow_tokenizer = importlib.import_module("transformers.convert_slow_tokenizer")

    if tokenizer_formats.importlib.util.find_spec("sentencepiece") is None:
        monkeypatch.setattr(tokenizer_formats, "_require", lambda library, path: None)
        monkeypatch.setattr(convert_slow_tokenizer, "requires_backends", lambda *_: None)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode)
    return [*map(detokenizer.add, ids), detokenizer.flush()]


def test_tekken(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tekken(tmp_path))
    hello, world = (10 + RANKS[word] for word in (b"hello", b" world"))
    assert tokenizer.encode("hello world") == [1, hello, world]
    assert tokenizer.vocab_size == len(RANKS) + 10
    assert tokenizer.decode([1, hello, world, 2]) == "hello world"
    assert tokenizer.token_bytes(10 + RANKS[b"\xe4\xbd"]) == b"\xe4\xbd"
    assert tokenizer.token_bytes(3) == b"[INST]"
    assert tokenizer.fewest_tokens("hello world" * 100, 1000) > 50


def test_tekken_with_a_template(tmp_path: Path) -> None:
    (write_tekken(tmp_path) / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}[/INST]")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode_chat(TURNS) == [1, 3, 10 + RANKS[b"hello"], 4]
    assert not {3, 4} & set(tokenizer.encode_chat([ChatTurn("user", "[INST][/INST]")])[2:-1]), "a user's text is text"


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model", "qwen.tiktoken"])
def test_tiktoken(tmp_path: Path, name: str) -> None:
    tokenizer = Tokenizer(write_tiktoken(tmp_path, name))
    ids = [RANKS[b"hello"], RANKS[b" world"], RANKS["你".encode()]]
    assert tokenizer.encode("hello world你") == ids
    first = len(RANKS)
    assert tokenizer.encode("[BOS]hello<|im_end|>") == [first, ids[0], first + 2]
    assert tokenizer.decode([first, *ids, first + 1, first + 2]) == "hello world你"
    assert tokenizer.token_bytes(first + 1) == f"<|reserved_token_{first + 1}|>".encode()


PATTERNS = {
    "joined": 'class T:\n    pat_str = "|".join([r"""[^l]+""", r"""l"""])\n',
    "module": 'PAT_STR = r"""[^l]+|l"""\n',
    "local": 'def f():\n    pat_str = "[^l]+|" "l"\n    raise RuntimeError(pat_str)\nclass T: ...\n',
}


@pytest.mark.parametrize("source", PATTERNS.values(), ids=PATTERNS)
def test_tiktoken_splits_by_the_pattern_in_the_folder(tmp_path: Path, source: str) -> None:
    """Its class is read, but not run."""
    (write_tiktoken(tmp_path) / "tokenization_tiny.py").write_text(f"{source}\nraise RuntimeError('run')\n")
    he, l_, o = (RANKS[part] for part in (b"he", b"l", b"o"))
    assert Tokenizer(tmp_path).encode("hello") == [he, l_, l_, o]


def test_tiktoken_without_the_pattern_of_its_class(tmp_path: Path) -> None:
    (write_tiktoken(tmp_path) / "tokenization_tiny.py").write_text("PATTERN = 'x'")
    with pytest.raises(ModelError, match=r"tiktoken\.model needs the pattern of the folder's own tokenizer class"):
        Tokenizer(tmp_path)


@pytest.mark.usefixtures("sentencepiece")
def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_sentencepiece(tmp_path))
    ids = {word: tokenizer._inner.token_to_id(word) for word in ("▁hello", "▁world", "!", "▁")}
    assert tokenizer.encode("hello world!") == [1, ids["▁hello"], ids["▁world"], ids["!"]]
    assert tokenizer.encode("hello 你")[-4:] == [ids["▁"], *(3 + byte for byte in "你".encode())]
    assert tokenizer.decode(tokenizer.encode("hello  你")) == "hello  你"
    assert pieces(tokenizer, tokenizer.encode("hello 你 world")) == ["", "hello", " ", "", "", "你", " world", ""]
    assert tokenizer.token_bytes(3 + 0xE4) == b"\xe4"


@pytest.mark.usefixtures("sentencepiece")
def test_sentencepiece_without_a_config(tmp_path: Path) -> None:
    (write_sentencepiece(tmp_path) / "tokenizer_config.json").unlink()
    assert Tokenizer(tmp_path).decode(Tokenizer(tmp_path).encode("hello world")) == "hello world"


@pytest.mark.usefixtures("sentencepiece")
def test_sentencepiece_of_an_unknown_class(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config\.json names the class FooTokenizer"):
        Tokenizer(write_sentencepiece(tmp_path, tokenizer_class="FooTokenizer"))


TEXT = st.text(st.sampled_from("hello world!你😀\n é"), max_size=12)


@pytest.mark.usefixtures("sentencepiece")
@pytest.mark.parametrize("write", [write_tekken, write_tiktoken, write_sentencepiece])
def test_streams_join_to_the_text(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    tokenizer = Tokenizer(write(tmp_path))

    @given(st.lists(TEXT, min_size=1, max_size=3), st.booleans())
    @settings(max_examples=examples(20), deadline=None, suppress_health_check=[HealthCheck.nested_given])
    def check(texts: list[str], special: bool) -> None:
        begin = [next(iter(tokenizer._added))] if special else []
        ids = [i for text in texts for i in [*begin, *tokenizer.encode(text, add_special_tokens=False)]]
        parts = pieces(tokenizer, ids)
        assert "".join(parts) == tokenizer.decode(ids)
        if len(texts) == 1 and not texts[0].startswith(" "):  # a SentencePiece decoder strips the first space
            assert "".join(parts) == texts[0]
            assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)

    check()


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: write_tekken(folder, old=True), r"tekken\.json is read with .*`pip install mistral-common`"),
        (write_sentencepiece, r"tokenizer\.model is read with .*`pip install sentencepiece`"),
        (lambda folder: (folder / "tiktoken.model").write_text("aGk= 0\nnone\n"), r"tiktoken\.model, line 2: no token"),
        (
            lambda folder: (folder / "tekken.json").write_text('{"special_tokens": []}'),
            "no readable tokenizer .*config",
        ),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Any], words: str
) -> None:
    write(tmp_path)
    monkeypatch.setattr(tokenizer_formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=words) as caught:
        Tokenizer(tmp_path)
    assert "\n" not in caught.value.message


def test_templates_come_from_every_place(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    places = [
        ("chat_template.json", json.dumps({"chat_template": "processor"}), "processor"),
        ("tokenizer_config.json", json.dumps({"chat_template": "config"}), "config"),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": name, "template": name} for name in ("rag", "default")]}),
            "default",
        ),
        ("additional_chat_templates/tool_use.jinja", "tools", "default"),
        ("chat_template.jinja", "file", "file"),
    ]
    (tmp_path / "additional_chat_templates").mkdir()
    for name, contents, wanted in places:
        (tmp_path / name).write_text(contents)
        assert Tokenizer(tmp_path).render_chat(TURNS) == wanted


@pytest.mark.usefixtures("sentencepiece")
def test_sentencepiece_of_gemma_keeps_the_first_space(tmp_path: Path) -> None:
    special = {"tokenizer_class": "GemmaTokenizer", "pad_token": "<pad>"}
    tokenizer = Tokenizer(write_sentencepiece(tmp_path, **special))
    for text in ("hello world", " hello", "你 world!"):
        ids = tokenizer.encode(text)
        assert ids[0] == 1
        assert tokenizer.decode(ids) == "".join(pieces(tokenizer, ids)) == text
