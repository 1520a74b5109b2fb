"""How a cluster divides prompts and answers among its workers."""

from enum import StrEnum


class Mode(StrEnum):
    """Where prompts are computed."""

    DISAGGREGATED = "disaggregated"
    """By prefill workers, which hand their KV over to the decode workers; by a decode worker only if it is alone."""
    COLOCATED = "colocated"
    """By the worker that decodes the answer, in mixed steps, wherever a worker has both roles."""
    ADAPTIVE = "adaptive"
    """Wherever it costs least by prediction, for each request anew."""
