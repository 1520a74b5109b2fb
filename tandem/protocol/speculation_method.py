"""The methods of speculative decoding."""

from enum import StrEnum


class SpeculationMethod(StrEnum):
    """How drafts are proposed."""

    AUTO = "auto"
    """N-grams where a step is over when its launch returns, as on CPUs; else off."""
    OFF = "off"
    NGRAM = "ngram"
    """What followed the request's last tokens when they occurred before, in its prompt or its answer."""
    SUFFIX = "suffix"
    """The same, and what followed them in earlier answers of the same tenant."""
    DRAFT = "draft"
    """By the folder of `--draft`: a small model with the same tokens, or heads over the model's hidden states."""
