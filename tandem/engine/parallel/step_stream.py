"""Sends packed steps from the first rank of a group to the other ranks, the followers, over Unix sockets.

A follower schedules nothing, samples nothing and has no requests: it only runs the steps that it receives. If either
side closes a connection, the whole group ends.
"""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tandem.engine.steps.prompt_scoring import StepPieces
from tandem.engine.steps.step_buffer import StepSizes
from tandem.engine.steps.step_packer import PackedStep, view_step
from tandem.protocol.errors import Unavailable

_HEADER = 12
"""Number of 64-bit words in a message's header.

They are five sizes, four bounds, the number of token indices in `drawn`, how many of these are scored positions, and
the number of words in the step's buffer.
"""
_NONE = -1


class StepSender:
    """Sends the steps of the first rank to all followers. Called on the engine's thread."""

    def __init__(self, followers: Sequence[socket.socket]) -> None:
        self._followers = followers

    def send(self, step: PackedStep) -> None:
        """Send a step to all followers. Raises Unavailable if a follower has closed its connection."""
        sizes, layout, drawn = step.sizes, step.layout, step.drawn
        scored = _NONE if step.scoring is None else step.scoring.scored
        counts = (sizes.tokens, sizes.rows, sizes.width, sizes.drawn, sizes.groups)
        bounds = layout.max_row_tokens, layout.max_context, layout.single_rows, _or_none(layout.max_cached)
        positions = np.zeros(0, np.int64) if drawn is None else drawn.numpy()
        header = np.array([*counts, *bounds, _NONE if drawn is None else len(drawn), scored, len(step.words)])
        message = b"".join(part.tobytes() for part in (header, step.words.numpy(), positions))
        try:
            for follower in self._followers:
                follower.sendall(message)
        except OSError as error:
            raise Unavailable("a rank of this worker has ended, and the worker ends with it") from error

    def close(self) -> None:
        """Close the connections, so that the followers end."""
        for follower in self._followers:
            follower.close()


def received_steps(leader: socket.socket) -> Iterator[PackedStep]:
    """Yield the steps that the first rank sends, until it closes the connection `leader`."""
    with leader.makefile("rb") as stream:
        while header := stream.read(8 * _HEADER):
            counts = [int(number) for number in np.frombuffer(header, np.int64)]
            *sizes, row_tokens, context, singles, cached, drawn, scored, words = counts
            step = view_step(
                _tensor(stream.read(8 * words)),
                StepSizes(*sizes),
                max_row_tokens=row_tokens,
                max_context=context,
                single_rows=singles,
                max_cached=None if cached == _NONE else cached,
            )
            if drawn == _NONE:
                yield replace(step, drawn=None)
                continue
            positions = _tensor(stream.read(8 * drawn)) if drawn else torch.empty(0, dtype=torch.int64)
            scoring = None if scored == _NONE else StepPieces(drawn - scored, scored)
            yield replace(step, drawn=positions, scoring=scoring)


def _tensor(received: bytes) -> Tensor:
    return torch.frombuffer(bytearray(received), dtype=torch.int64)


def _or_none(number: int | None) -> int:
    return _NONE if number is None else number
