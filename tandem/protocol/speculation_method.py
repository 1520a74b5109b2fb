"""The methods of speculative decoding."""

from enum import StrEnum


class SpeculationMethod(StrEnum):
    """The method by which draft tokens are proposed."""

    AUTO = "auto"
    """N-grams if an engine's step has ended when its launch returns, as on CPUs; else off."""
    OFF = "off"
    NGRAM = "ngram"
    """The tokens that followed an earlier occurrence of the request's last tokens, in its prompt or its answer."""
    SUFFIX = "suffix"
    """As `NGRAM`, and also the tokens that followed them in earlier answers of the same tenant."""
    DRAFT = "draft"
    """Drafts come from the folder of `--draft`: a small model with the same tokens, or heads over the hidden states."""
