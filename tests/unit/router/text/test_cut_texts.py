"""The end of a text has the ids that it has in the whole text, and only the end is encoded."""

import random
from pathlib import Path
from typing import Any

import pytest

from router.requests.prompts import PromptEncoder
from router.requests.request import ClientRequest, Options
from router.text.chat_template import ChatTurn
from router.text.tokenizer import Tokenizer
from router.text.tokenizing import TokenizerPool
from router.workers.worker_pool import ServedModel
from tandem.protocol.errors import ContextLengthExceeded
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.messages import ModelFacts

_WORDS = (
    "the",
    "quick",
    "Fox,",
    "jumps;",
    "over",
    "1234",
    "8.5",
    "naïve",
    "café",
    "世界",
    "😀",
    "\n",
    "  ",
    "<|im_end|>",
)
MIB = 1 << 20
SERVED = ServedModel(ModelFacts("fake", 400, 2048, (2,), "float32"), 2048, 2048, 2048)


def ordinary(size: int) -> str:
    choose = random.Random(7)
    return " ".join(choose.choice(_WORDS) for _ in range(size))


TEXTS = {
    "words": ordinary(30_000),
    "code": "def f(x):\n\treturn {x: [12345, 67.8e-9]}  # comment\n\n\n" * 3000,
    "no spaces": "你好世界，日本語のテキスト。" * 8000,
    "spaces": " " * 50_000 + "fox",
    "special tokens": "<|im_start|>user\nfox<|im_end|>" * 5000,
}


class CountedInner:
    """The library's tokenizer, which counts the characters that it encodes."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.chars = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.chars += sum(map(len, texts))
        return self._inner.encode_batch_fast(texts, **options)


@pytest.fixture
def counted(model: Path) -> tuple[Tokenizer, CountedInner]:
    tokenizer = Tokenizer(model)
    inner = CountedInner(tokenizer._inner)
    tokenizer._inner = inner
    return tokenizer, inner


@pytest.mark.parametrize("last", [1, 50, 1000])
@pytest.mark.parametrize("text", TEXTS)
def test_the_last_ids_are_those_of_the_whole_text(tokenizer: Tokenizer, text: str, last: int) -> None:
    assert tokenizer.encode(TEXTS[text], last=last) == tokenizer.encode(TEXTS[text])[-last:]
    chat = tokenizer.render_chat([ChatTurn("user", TEXTS[text])])
    assert tokenizer.encode_rendered(chat, last=last) == tokenizer.encode_rendered(chat)[-last:]


@pytest.mark.parametrize("text", ["word " * (MIB // 5), "a" * MIB, "<" * MIB])
def test_a_mebibyte_is_not_encoded_for_its_last_100_tokens(counted: tuple[Tokenizer, CountedInner], text: str) -> None:
    tokenizer, inner = counted
    assert len(tokenizer.encode(text, last=100)) == 100
    chat = tokenizer.render_chat([ChatTurn("user", text)])
    assert len(tokenizer.encode_rendered(chat, last=100)) == 100
    assert inner.chars < MIB // 8


async def test_keeping_more_tokens_than_the_context_has_does_not_lift_the_limit_of_the_text(
    counted: tuple[Tokenizer, CountedInner],
) -> None:
    tokenizer, inner = counted
    pool = TokenizerPool(1, 8 * MIB, 1.0)
    encoder = PromptEncoder(tokenizer, pool, max_messages=10)
    request = ClientRequest("", "", "word " * MIB, Options(), EventTime.now(LifecycleEvent.RECEIVED))
    for last in (SERVED.facts.max_context, 2**31 - 1):
        with pytest.raises(ContextLengthExceeded, match="at least"):
            await encoder.token_ids(request, SERVED, last)
    assert len(await encoder.token_ids(request, SERVED, SERVED.facts.max_context - 1)) == SERVED.facts.max_context - 1
    assert inner.chars < MIB // 8
    pool.close()
