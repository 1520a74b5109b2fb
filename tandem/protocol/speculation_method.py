"""The methods of speculative decoding."""

from enum import StrEnum


class SpeculationMethod(StrEnum):
    """The method by which draft tokens are proposed."""

    AUTO = "auto"
    """N-grams if launching a step also computes it, as on CPUs; otherwise no speculative decoding."""
    OFF = "off"
    NGRAM = "ngram"
    """Proposes the tokens that followed an earlier occurrence of the request's newest tokens in prompt or answer."""
    SUFFIX = "suffix"
    """Like `NGRAM`, and proposes also from earlier answers of the same tenant."""
    DRAFT = "draft"
    """Proposes with a model in the folder `--draft`: a small model with the same tokens, or heads on hidden states."""
    MTP = "mtp"
    """Proposes with the multi-token prediction layer of the model's own checkpoint."""
