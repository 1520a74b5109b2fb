"""The placement modes of a cluster: where prompts are prefilled."""

from enum import StrEnum


class Mode(StrEnum):
    """The placement mode, which decides on which worker a prompt is prefilled."""

    DISAGGREGATED = "disaggregated"
    """Prefill runs on prefill workers, which transfer the KV to decode workers.

    It runs on a decode worker only if that is the only worker.
    """
    COLOCATED = "colocated"
    """Prefill runs on the worker that decodes the request, in mixed steps.

    If no worker has both roles, it runs on prefill workers, as in `DISAGGREGATED`.
    """
    ADAPTIVE = "adaptive"
    """Prefill runs on the worker with the lowest predicted cost, decided for each request."""
