"""A follower, in its own process: it joins the other ranks, loads its part of the model, and runs the group's steps."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from kv_transfer.ranks.transport_server import STATUS_S, serve_transport
from tandem.engine.config import EngineConfig
from tandem.engine.config.sharding import Rank
from tandem.engine.device import parse_device
from tandem.engine.kernels.base import is_cpu
from tandem.engine.model_runner import Follower
from tandem.engine.parallel.adapter_stream import write_adapters
from tandem.engine.parallel.collectives import Collectives, GlooCollectives
from tandem.engine.parallel.step_stream import received_steps
from tandem.logging.logs import LogConfig, begin_log
from tandem.protocol.errors import TandemError
from tandem.worker.transfer import RankTransfer

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""Maximum time in seconds until all ranks have joined, and of one exchange between them.

The first exchange waits for the rank that loads its part of the model last.
"""


@dataclass(frozen=True, slots=True)
class FollowerSettings:
    """The settings of a follower, which the first rank sends to the follower's process."""

    config: EngineConfig
    """With the rank's own device, or on CPUs with its share of the threads."""
    rank: Rank
    meeting: Path
    """The file through which the ranks find each other."""
    transfer: RankTransfer | None
    """The settings of the rank's transport; None = the rank hands over no KV."""
    log: LogConfig


def join(config: EngineConfig, rank: Rank, meeting: Path) -> Collectives:
    """Join the other ranks. Raises RuntimeError if they do not join in time, or one has ended."""
    device = parse_device(config.device)
    if is_cpu(device):
        # The ranks are on one host, and gloo would listen on the host's address.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        return GlooCollectives(rank, meeting, START_TIMEOUT_S)
    from tandem.engine.parallel.cuda_collectives import CudaCollectives

    return CudaCollectives(rank, meeting, START_TIMEOUT_S, device)


def follow(steps: socket.socket, adapters: socket.socket, calls: Connection) -> None:
    """Run as a follower until the first rank closes the connection for steps; see `FollowerProcess`."""
    try:
        settings: FollowerSettings = calls.recv()
    except EOFError:
        return  # the first rank cannot start
    config, rank, transfer = settings.config, settings.rank, settings.transfer
    name = f"rank {rank.world_number}"
    if transfer is None:
        begin_log(settings.log, name)
    else:
        begin_log(settings.log, f"{transfer.me.worker_id} {name}", transfer.me.incarnation)
    with steps:
        try:
            collectives = join(config, rank, settings.meeting)
            follower = Follower.load(config, collectives)
            if transfer is not None:
                opener = transfer.opener(rank.world_number, follower.cache)
                _start_thread(serve_transport, calls, opener, follower.page_sums, follower.share_pages)
            if rank.divides_tokens:
                _start_thread(_report, calls)
            _start_thread(write_adapters, adapters, follower.adapters)
            follower.run(received_steps(steps, parse_device(config.device)))
        except (TandemError, RuntimeError):
            log.exception("rank %d has ended", rank.world_number)
            raise SystemExit(1) from None
        collectives.close()


def _report(pipe: Connection) -> None:
    """Report every `STATUS_S` seconds that this process runs, until the first rank closes its end."""
    with contextlib.suppress(OSError):
        while True:
            pipe.send(None)
            time.sleep(STATUS_S)


def _start_thread(run: Callable[..., None], *arguments: object) -> None:
    """Run a function on a thread of a follower; if it fails, end the process, because the rank lacks a service then."""

    def run_or_end() -> None:
        try:
            run(*arguments)
        except BaseException:
            log.exception("a thread of this rank has failed, and the rank ends with it")
            os._exit(1)

    threading.Thread(target=run_or_end, name=run.__name__.strip("_"), daemon=True).start()
