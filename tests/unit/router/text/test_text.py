"""Tokens to text: incremental decoding, stop strings, order of tokens."""

import itertools
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from router.requests.assembler import TokenAssembler
from router.text.answer_text import AnswerText, TextJob
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopStrings
from router.text.tokenizer import Tokenizer
from tandem.protocol.errors import Unavailable
from tandem.protocol.messages import FinishReason, TokenLogprobs
from tests.soak import examples
from tests.unit.router.fake_cluster import VOCAB_SIZE

BROKEN = "\N{REPLACEMENT CHARACTER}"


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode)
    return [*(detokenizer.add(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        "你好，世界！日本語テキスト",
        "😀👩‍👩‍👧‍👦🏳️‍🌈",
        "naïve café Ω≈ç√",
        " \n\t  x ",
        "\N{REPLACEMENT CHARACTER} ok",
    ],
)
def test_pieces_are_whole_characters_and_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    parts = pieces(tokenizer, tokenizer.encode(text))
    assert "".join(parts) == text
    if BROKEN not in text:
        assert not any(BROKEN in part for part in parts)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=80))
@settings(max_examples=examples(30))
def test_any_tokens_join_to_their_decoding(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@given(st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40), max_size=6))
@settings(max_examples=examples(30))
def test_tokens_that_come_together_join_to_their_decoding(tokenizer: Tokenizer, batches: list[list[int]]) -> None:
    detokenizer = Detokenizer(tokenizer.decode)
    parts = [*map(detokenizer.add_all, batches), detokenizer.flush()]
    assert "".join(parts) == tokenizer.decode([i for batch in batches for i in batch])


def test_endless_broken_text_is_let_out_in_time(tokenizer: Tokenizer) -> None:
    broken = tokenizer._inner.token_to_id("ÿ")
    detokenizer = Detokenizer(tokenizer.decode)
    longest = wait = 0
    for _ in range(500):
        wait = 0 if detokenizer.add(broken) else wait + 1
        longest = max(longest, wait)
    assert longest < 40


@given(st.text(max_size=30))
@settings(max_examples=examples(30))
def test_the_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_the_bytes_of_special_and_unknown_tokens(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_bytes(token_id) for token_id in (1, 10**6)] == [b"<|im_start|>", b""]


def test_special_tokens_are_skipped(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello")
    assert "".join(pieces(tokenizer, [1, *ids, 0, *ids, 2])) == "HelloHello"


def test_a_sentencepiece_tokenizer_with_byte_fallback(tmp_path: Path) -> None:
    """Llama 2's kind: the first space is stripped, and unknown characters are spelled in bytes."""
    words = ["<unk>", "<s>", "▁Hello", "▁world", "▁", "!", *(f"<0x{i:02X}>" for i in range(256))]
    inner = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    inner.add_special_tokens(["<unk>", "<s>"])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    spelled = [inner.token_to_id(f"<0x{byte:02X}>") for byte in "中😀".encode()]
    ids = [1, 2, 3, 4, 3, *spelled, 5, 1, 2, *spelled]
    detokenizer = Detokenizer(lambda tokens: inner.decode(tokens, skip_special_tokens=True))
    parts = [*(detokenizer.add(i) for i in ids), detokenizer.flush()]
    assert "".join(parts) == inner.decode(ids) == "Hello world  world中😀! Hello中😀"
    assert not any(BROKEN in part for part in parts)
    for size in range(1, len(ids) + 1):
        together = Detokenizer(lambda tokens: inner.decode(tokens, skip_special_tokens=True))
        parts = [*(together.add_all(ids[at : at + size]) for at in range(0, len(ids), size)), together.flush()]
        assert "".join(parts) == inner.decode(ids)
        assert not any(BROKEN in part for part in parts)
    inner.save(str(tmp_path / "tokenizer.json"))
    saved = Tokenizer(tmp_path)
    assert b"".join(map(saved.token_bytes, ids)).decode() == "<s> Hello world  world中😀!<s> Hello中😀"


def split(text: str, dice: random.Random) -> list[str]:
    cuts = sorted({0, len(text), *(dice.randrange(len(text) + 1) for _ in range(6))})
    return [text[a:b] for a, b in itertools.pairwise(cuts)]


@given(st.text("ab", max_size=24), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(0, 99))
@settings(max_examples=examples(60))
def test_stop_strings_cut_wherever_pieces_end(text: str, stops: list[str], seed: int) -> None:
    watch = StopStrings(stops)
    out = ""
    for piece in split(text, random.Random(seed)):
        out += watch.add(piece)
        assert not any(stop in out for stop in stops)
        if watch.matched:
            break
    else:
        out += watch.flush()
    positions = [text.index(stop) for stop in stops if stop in text]
    if not positions:
        assert (out, watch.matched) == (text, "")
    else:
        assert watch.matched
        assert text.startswith(out + watch.matched)
        assert len(out) >= min(positions)


def test_nothing_is_held_that_cannot_become_a_stop() -> None:
    watch = StopStrings(["END"])
    assert [watch.add("abc E"), watch.add("N"), watch.add("X"), watch.add("EN")] == ["abc ", "", "ENX", ""]
    assert watch.flush() == "EN"


def test_a_stop_string_that_is_whole_too_early_is_text() -> None:
    watch = StopStrings(["abcX", "bc"])
    assert [watch.add("abc", may_match=False), watch.add("d")] == ["", "abcd"]
    assert (watch.matched, watch.add("b"), watch.add("c"), watch.matched) == ("", "", "", "bc")
    late = StopStrings(["ab"], include=True)
    assert [late.add("ab", may_match=False), late.add("a", may_match=False), late.add("bc")] == ["ab", "", "ab"]
    assert late.matched == "ab"


def test_stop_strings_end_nothing_before_the_least_length(tokenizer: Tokenizer) -> None:
    for least in range(7):
        text = AnswerText(tokenizer, ["a"], min_tokens=least)
        ids = tokenizer.encode("a") * 6
        first, second = TextJob(ids[:2]), TextJob(ids[2:], finish=FinishReason.LENGTH)
        text.run(first)
        text.run(second)
        whole, ended = first.text + second.text, first.matched_stop or second.matched_stop
        assert (whole, ended) == (("a" * least, "a") if least < 6 else ("a" * 6, ""))


def test_special_tokens_that_are_markers_stay_in_the_text(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a 好"), 1, *tokenizer.encode("b"), 2]
    kept = tokenizer.special_ids(["<|im_start|>", "<tool_call>"])
    job = TextJob(ids, finish=FinishReason.STOP)
    AnswerText(tokenizer, [], kept=kept).run(job)
    assert (kept, job.text) == ({1: "<|im_start|>"}, "a 好<|im_start|>b")


NOTHING: tuple[tuple[int, ...], tuple[TokenLogprobs, ...]] = ((), ())


def test_tokens_come_out_once_and_in_order() -> None:
    order = TokenAssembler()
    assert order.add(1, (11,)) == NOTHING
    order.finish_at(4, FinishReason.LENGTH)
    assert order.add(3, (13,)) == NOTHING
    assert order.finished is None
    assert order.add(0, (10,)) == ((10, 11), ())
    assert order.add(0, (10, 11, 12)) == ((12, 13), ())
    assert order.finished is FinishReason.LENGTH


def test_log_probabilities_come_out_with_their_tokens() -> None:
    scores = {token: TokenLogprobs(-float(token)) for token in range(10, 15)}

    def add(first: int, *tokens: int) -> list[tuple[int, float]]:
        fresh, logprobs = order.add(first, tokens, tuple(scores[token] for token in tokens))
        return [(token, score.chosen) for token, score in zip(fresh, logprobs, strict=True)]

    order = TokenAssembler()
    assert add(0, 10) == [(10, -10.0)]
    assert add(2, 12) == add(2, 12) == []
    assert add(0, 10, 11) == [(11, -11.0), (12, -12.0)]
    order.restart()
    assert add(0, 10) == add(1, 11, 12) == []
    assert add(2, 12, 13, 14) == [(13, -13.0), (14, -14.0)]


def test_a_new_attempt_forgets_what_was_early_and_where_the_last_one_ended() -> None:
    order = TokenAssembler()
    assert order.add(0, (10,)) == ((10,), ())
    order.add(2, (99,))
    order.finish_at(3, FinishReason.STOP)
    order.restart()
    assert order.finished is None
    assert order.add(0, (10,)) == NOTHING
    assert order.add(1, (11,)) == ((11,), ())
    assert order.add(2, (12,)) == ((12,), ())
    assert order.finished is None
    order.finish_at(4, FinishReason.LENGTH)
    assert order.add(3, (13,)) == ((13,), ())
    assert order.finished is FinishReason.LENGTH


def test_a_repeated_token_that_differs_is_no_answer() -> None:
    order = TokenAssembler()
    assert order.add(0, (10, 11)) == ((10, 11), ())
    order.restart()
    assert order.add(0, (10,)) == NOTHING
    with pytest.raises(Unavailable, match=r"token 1 .* send the request again"):
        order.add(1, (99,))
    assert order.count == 2
