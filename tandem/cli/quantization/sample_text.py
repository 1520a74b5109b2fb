"""The built-in text: one part to calibrate quantization, the other to measure quality.

The text exists in every installation: the topics of Python's `help` and, in a checkout, the pages of `docs/`. It
differs between Python versions and commits, so results record its hash.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from tandem.protocol.errors import InvalidArgument

Part = Literal["calibration", "evaluation"]

_DOCS = Path(__file__).parents[3] / "docs"
_BLOCK = 8192
"""Characters per block; a block belongs entirely to one part."""
_EVALUATION = 4
"""Every fourth block belongs to the part for evaluation."""


def sample_text(part: Part, *, docs: bool = True) -> str:
    """Return one part of the text. Repeated paragraphs are kept once, so that no paragraph is in both parts.

    Without `docs`, the pages of `docs/` are left out, and the text does not depend on the commit.
    """
    pages = [*(topics[name] for name in sorted(topics)), *(_docs() if docs else ())]
    paragraphs = dict.fromkeys(paragraph.strip() for page in pages for paragraph in page.split("\n\n"))
    parts: dict[bool, list[str]] = {True: [], False: []}
    position = 0
    for paragraph in paragraphs:
        parts[position // _BLOCK % _EVALUATION == 0].append(paragraph)
        position += len(paragraph)
    return "\n\n".join(parts[part == "evaluation"])


def text_hash(text: str) -> str:
    """Return the first 12 hexadecimal digits of the text's SHA-256, which identify the text in results."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def token_samples(encode: Callable[[str], Sequence[int]], text: str, count: int, tokens: int) -> list[Sequence[int]]:
    """Return `count` pieces of `tokens` tokens each, spread evenly over the text without overlap.

    Raises InvalidArgument if the text is too short.
    """
    ids = encode(text)
    if len(ids) < count * tokens:
        raise InvalidArgument(
            "samples",
            f"the text has {len(ids)} tokens, {count} samples of {tokens} tokens need {count * tokens}; "
            "ask for fewer or shorter ones, or give a longer text.",
        )
    stride = len(ids) // count
    return [ids[number * stride : number * stride + tokens] for number in range(count)]


def _docs() -> list[str]:
    return [page.read_text(encoding="utf-8") for page in sorted(_DOCS.rglob("*.md"))]
