"""The placement modes of a cluster for prefill and decode."""

from enum import StrEnum


class Mode(StrEnum):
    """The mode, which decides on which worker a prompt is prefilled."""

    DISAGGREGATED = "disaggregated"
    """Prefill runs on prefill workers, which transfer the KV to decode workers.

    It runs on a decode worker only if that is the only worker.
    """
    COLOCATED = "colocated"
    """Prefill runs on the worker that decodes, in mixed steps, if any worker has both roles."""
    ADAPTIVE = "adaptive"
    """Prefill runs on the worker with the lowest predicted cost for each request."""
