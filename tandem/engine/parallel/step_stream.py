"""Sends steps from the first rank of a group to the other ranks, the followers, over Unix sockets.

A follower schedules nothing, samples nothing and has no requests: it only runs the steps that it receives. If either
side closes a connection, the whole group ends.
"""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tandem.engine.kernels.base import is_cpu
from tandem.engine.steps.prompt_scoring import StepPieces
from tandem.engine.steps.step_buffer import StepSizes
from tandem.engine.steps.step_packer import PackedStep, view_step, with_host_words
from tandem.protocol.errors import Unavailable

_HEADER = 14
"""Number of 64-bit words in a message's header.

They are the number of the CUDA graph, six sizes, four bounds, the number of token indices in `drawn`, how many of
these are scored positions, and the number of words in the step's buffer.
"""
_NONE = -1
_AS_PACKED = -2
"""The header's number of token indices if `drawn` is that of the step's buffer and does not follow the words."""


class GraphStep(NamedTuple):
    """A step that a CUDA graph computes: the graph's number, which is the same on all ranks, and its input.

    `words` [n] int64 is in host memory. The graph's input has padding up to the size of the graph.
    """

    graph: int
    words: Tensor


RankStep = PackedStep | GraphStep
"""A step as the ranks of a group exchange it."""


class StepSender:
    """Sends the steps of the first rank to all followers. Called on the engine's thread."""

    def __init__(self, followers: Sequence[socket.socket]) -> None:
        self._followers = followers

    def send(self, step: RankStep) -> None:
        """Send a step to all followers. Raises Unavailable if a follower has closed its connection."""
        header, positions = _header(step)
        parts = [part for part in (header, step.words.numpy(), positions) if part is not None and part.size]
        try:
            for follower in self._followers:
                for part in parts:
                    follower.sendall(part.data)
        except OSError as error:
            raise Unavailable("a rank of this worker has ended, and the worker ends with it") from error

    def close(self) -> None:
        """Close the connections, so that the followers end."""
        for follower in self._followers:
            follower.close()


def _header(step: RankStep) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a message's header, and the token indices that follow the words, if they are not those of the buffer."""
    if isinstance(step, GraphStep):
        return np.array([step.graph, *(_NONE,) * (_HEADER - 2), len(step.words)]), None
    sizes, layout = step.sizes, step.layout
    counts = (sizes.tokens, sizes.rows, sizes.width, sizes.drawn, sizes.groups, sizes.states)
    bounds = layout.max_row_tokens, layout.max_context, layout.single_rows, _or_none(layout.max_cached)
    scored, drawn, positions = _NONE, _AS_PACKED, None
    if step.scoring is not None:
        # The only step whose indices are not in its buffer. On a GPU this waits for the steps before it.
        assert step.drawn is not None
        positions = step.drawn.cpu().numpy()
        scored, drawn = step.scoring.scored, len(positions)
    elif step.drawn is None and sizes.drawn != sizes.tokens:
        drawn = _NONE
    return np.array([_NONE, *counts, *bounds, drawn, scored, len(step.words)]), positions


def received_steps(leader: socket.socket, device: torch.device) -> Iterator[RankStep]:
    """Yield the steps that the first rank sends, until it closes the connection `leader`.

    The tensors of a `PackedStep` are on `device`, the words of a `GraphStep` in host memory, pinned if it is a GPU.
    """

    def read(words: int) -> Tensor:
        received = torch.frombuffer(bytearray(stream.read(8 * words)), dtype=torch.int64)
        # PyTorch's allocator of pinned memory reuses it only after the device has read it.
        return received if is_cpu(device) else received.pin_memory()

    with leader.makefile("rb") as stream:
        while header := stream.read(8 * _HEADER):
            numbers = [int(number) for number in np.frombuffer(header, np.int64)]
            graph, *sizes, row_tokens, context, singles, cached, drawn, scored, words = numbers
            if graph != _NONE:
                yield GraphStep(graph, read(words))
                continue
            packed = read(words)
            step = view_step(
                packed.to(device, non_blocking=True),
                StepSizes(*sizes),
                max_row_tokens=row_tokens,
                max_context=context,
                single_rows=singles,
                max_cached=None if cached == _NONE else cached,
            )
            step = with_host_words(step, packed)
            if drawn == _AS_PACKED:
                yield step
            elif drawn == _NONE:
                yield replace(step, drawn=None)
            else:
                positions = read(drawn).to(device, non_blocking=True)
                yield replace(step, drawn=positions, scoring=StepPieces(drawn - scored, scored))


def _or_none(number: int | None) -> int:
    return _NONE if number is None else number
