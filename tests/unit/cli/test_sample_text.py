"""The built-in text: its two parts, and the samples that are taken from it."""

import pytest

from tandem.cli.quantization.sample_text import sample_text, text_hash, token_samples
from tandem.protocol.errors import InvalidArgument


def test_no_paragraph_is_in_both_parts() -> None:
    parts = [set(sample_text(part).split("\n\n")) for part in ("calibration", "evaluation")]
    assert not parts[0] & parts[1]
    sizes = [len(sample_text(part)) for part in ("calibration", "evaluation")]
    assert sizes[0] > 300_000
    assert sizes[1] > 100_000


def test_the_text_is_named_by_its_hash() -> None:
    assert text_hash("a") != text_hash("b")
    assert text_hash(sample_text("evaluation")) == text_hash(sample_text("evaluation"))


def test_samples_are_spread_over_the_text() -> None:
    samples = token_samples(lambda text: list(map(ord, text)), "abcdefghijk", 3, 2)
    assert ["".join(map(chr, sample)) for sample in samples] == ["ab", "de", "gh"]


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="has 5 tokens, 3 samples of 2 tokens need 6"):
        token_samples(lambda text: list(map(ord, text)), "abcde", 3, 2)
