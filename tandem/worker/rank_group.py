"""The ranks of a worker: the first is the worker's own process, and the others, the followers, are its children.

All ranks live and die together. The kernel kills a follower when the first rank's process ends, because a step that
waits for another rank on a GPU cannot be ended in any other way, and a stopped process cannot end itself. The first
rank learns from `ended_rank`, or from an error of the next step, that a follower has ended, and from `silent_rank` that
one hangs.
"""

import itertools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from kv_transfer.rank_plan import pool_page_bytes
from kv_transfer.ranks.page_sums import GroupPageSums
from kv_transfer.ranks.rank_messages import ReceivedMessages
from kv_transfer.ranks.remote_transport import RemoteTransport
from tandem.cost_model.step_collectives import StepCollectives, with_divided_tokens
from tandem.engine.cache.tiers.cache_tiers import BATCH
from tandem.engine.cache.tiers.host_memory import HostMemory
from tandem.engine.config import EngineConfig
from tandem.engine.config.sharding import Rank
from tandem.engine.device import parse_device
from tandem.engine.kernels.base import is_cpu
from tandem.engine.model_runner import ModelRunner
from tandem.engine.model_sizes import context_collectives, step_collectives
from tandem.engine.parallel.adapter_stream import AdapterSender
from tandem.engine.parallel.step_stream import StepSender
from tandem.engine.weights.checkpoint import Progress
from tandem.logging.logs import LogConfig
from tandem.protocol.errors import InvalidArgument, Unavailable
from tandem.worker.follower import FollowerSettings, join
from tandem.worker.follower_process import FollowerProcess
from tandem.worker.transfer import OpenTransport, RankTransfer, ranked_pages
from tandem.worker.worker import first_line

END_TIMEOUT_S = 5.0
HANG_S, HANG_ON_CPU_S = 2.0, 10.0
"""Seconds of silence after which a follower hangs. On a CPU, the ranks compete for its cores."""


class FollowerCopies:
    """`RankCopies` of a follower. The first use makes the shared memory; the follower's transport must be open."""

    def __init__(self, transport: RemoteTransport, page_bytes: int) -> None:
        self._transport = transport
        self.page_bytes = page_bytes

    @cached_property
    def rows(self) -> Tensor:
        """The memory that this process shares with the follower, [pages copied together, page bytes] uint8."""
        # A file without a name is freed when neither process has it mapped.
        file = os.memfd_create("kv-pages")
        try:
            os.ftruncate(file, BATCH * self.page_bytes)
            memory = HostMemory(BATCH, self.page_bytes, torch.device("cpu"), file)
            self._transport.share_pages(Path(f"/proc/{os.getpid()}/fd/{file}")).result()
        finally:
            os.close(file)
        return memory.rows

    def copy(self, pages: Sequence[int], *, to_pool: bool) -> "Future[None]":
        """Copy pages of the follower's pool into the first rows, or back (`RankCopies.copy`)."""
        return self._transport.copy_pages(pages, to_pool=to_pool)

    def sums(self, pages: Sequence[int], filled: Sequence[int], groups: Sequence[int]) -> "Future[Sequence[int]]":
        """Compute the follower's checksums of pages (`RankCopies.sums`)."""
        return self._transport.sums(pages, filled, groups)


class RankGroup:
    """The followers of a worker's first rank, and the exchange with them. The worker's process owns it."""

    def __init__(
        self,
        config: EngineConfig,
        ranks: int,
        transfer: RankTransfer | None = None,
        *,
        stages: int = 1,
        divides_tokens: bool = False,
        log_config: LogConfig | None = None,
    ) -> None:
        """Start the followers and join them; they load their parts of the model while the first rank loads its own.

        The model is divided among `stages` pipeline stages of `ranks` ranks each. On GPUs, rank n computes on the n-th
        GPU after that of the config. With `divides_tokens`, each rank has the whole model, and the first rank alone
        hands KV over. `transfer` has the settings of the ranks' transports; without it, they have none.
        The thread that calls this must live as long as the group: the kernel kills the followers when it ends. Raises
        InvalidArgument if there are fewer GPUs than ranks or if a GPU cannot access the memory of another, Unavailable
        if the ranks cannot be started or do not join.
        """
        self._config, self.ranks, self._stages = config, ranks * stages, stages
        self._divides_tokens = divides_tokens
        self._transports: list[RemoteTransport] = []
        self._reports: list[ReceivedMessages] = []
        """The reports of followers that divide tokens, which have no transport."""
        setting = "tensor_parallel_size" if stages == 1 else "pipeline_parallel_size"
        _check_devices(config.device, self.ranks, "context_parallel_size" if divides_tokens else setting)
        members = [replace(Rank.of(n, ranks, stages), divides_tokens=divides_tokens) for n in range(self.ranks)]
        self._followers = _start_followers(len(members) - 1)
        # A file without a name ends with this process. The followers open it through this process's descriptor.
        self._meeting = os.memfd_create("meeting")
        meeting = Path(f"/proc/{os.getpid()}/fd/{self._meeting}")
        self._steps = StepSender([follower.steps for follower in self._followers])
        self._adapters = AdapterSender([follower.adapters for follower in self._followers])
        self._open = True
        try:
            for member, follower in zip(members[1:], self._followers, strict=True):
                config = self.config_of(member.world_number)
                settings = FollowerSettings(config, member, meeting, transfer, log_config or LogConfig())
                self._lead(follower, settings)
            self._collectives = join(self.config_of(0), members[0], meeting)
        except BaseException as error:
            ended = self.ended_rank()
            self._end_followers()
            if not isinstance(error, Exception):  # the user ends this process, for example
                raise
            reason = first_line(error) if ended is None else f"rank {ended} has ended, see its log"
            raise Unavailable(f"the {self.ranks} ranks of this worker have not joined: {reason}") from error

    def _lead(self, follower: FollowerProcess, settings: FollowerSettings) -> None:
        follower.calls.send(settings)
        number = settings.rank.world_number
        if settings.rank.divides_tokens:
            self._reports.append(ReceivedMessages(follower.calls))
            threading.Thread(target=self._reports[-1].ignore, name=f"from rank {number}", daemon=True).start()
        else:
            self._transports.append(RemoteTransport(follower.calls, number))

    def load(self, progress: Progress | None = None) -> ModelRunner:
        """Load the first rank's part of the model, and return the runner of the group's steps.

        Raises as `ModelRunner.load` does.
        """
        config = self.config_of(0)
        runner = ModelRunner.load(config, progress, collectives=self._collectives, on_step=self._steps.send)
        # From now on: each rank has loaded the adapters of the config by itself.
        runner.adapters.on_write = self._adapters.write
        runner.device_name = f"{self.ranks} ranks, {runner.device_name}"
        if self._divides_tokens:
            runner.roofline = replace(runner.roofline, token_ranks=self.ranks)
            runner.cost_guess = with_divided_tokens(runner.cost_guess, self.ranks)
        else:
            pages = ranked_pages(runner.cache, runner.page_parts, self.ranks, self._stages)
            runner.page_sums = GroupPageSums(pages, runner.page_sums, [rank.sums for rank in self._transports])
            sizes = [pool_page_bytes(pages, number) for number in range(1, self.ranks)]
            runner.other_ranks = tuple(map(FollowerCopies, self._transports, sizes))
        if not config.on_cpu and self.ranks > self._stages:
            collectives = self._step_collectives(runner)
            runner.roofline = replace(runner.roofline, collectives=collectives)
            runner.cost_guess = collectives.added_to(runner.cost_guess)
        return runner

    def _step_collectives(self, runner: ModelRunner) -> StepCollectives:
        """Return the collective operations of each step on GPUs."""
        item_bytes, ceilings = runner.dtype.itemsize, runner.roofline.ceilings
        if self._divides_tokens:
            return context_collectives(runner.spec, self.ranks, item_bytes, runner.cache.element_bytes, ceilings)
        return step_collectives(runner.spec, self.ranks // self._stages, item_bytes, ceilings)

    @property
    def open_transports(self) -> list[OpenTransport]:
        """The functions that open the transports of the followers that have one, in the order of their numbers."""
        return [rank.open for rank in self._transports]

    def ended_rank(self) -> int | None:
        """Return the number of a follower that has ended; None if all are alive."""
        return next((number for number, follower in enumerate(self._followers, 1) if not follower.is_alive), None)

    def silent_rank(self) -> int | None:
        """Return the number of a follower that has been silent for `HANG_S` seconds; None if there is none.

        Followers report from the time at which their transports are open, or their parts of the model are loaded if
        they divide tokens.
        """
        most_s = HANG_ON_CPU_S if is_cpu(parse_device(self._config.device)) else HANG_S
        silences_s = [rank.silent_s() for rank in self._transports] + [reports.silent_s for reports in self._reports]
        return next((number for number, silent_s in enumerate(silences_s, 1) if silent_s >= most_s), None)

    def kill(self) -> None:
        """Kill the followers, because one of them hangs or has ended."""
        for follower in self._followers:
            follower.kill()

    def close(self) -> None:
        """End the followers. Idempotent."""
        if self._open:
            self._open = False
            # The followers leave the group now, and leaving waits for the first rank. If it fails, they are killed.
            self._steps.close()
            leaving = threading.Thread(target=self._collectives.close, name="leave ranks", daemon=True)
            sound = self.ended_rank() is None
            if sound:
                leaving.start()
            self._end_followers()
            if sound:
                leaving.join(END_TIMEOUT_S)

    def config_of(self, number: int) -> EngineConfig:
        """Return the config of one rank: its GPU, or on CPUs its share of the threads."""
        config = self._config
        device = parse_device(config.device)
        if not is_cpu(device):
            return replace(config, device=f"cuda:{device.index + number}")
        threads = config.threads or len(os.sched_getaffinity(0))
        return replace(config, threads=max(1, threads // self.ranks))

    def _end_followers(self) -> None:
        self._steps.close()
        for follower in self._followers:
            follower.end(END_TIMEOUT_S)
        self._adapters.close()
        for rank in self._transports:
            rank.close()
        os.close(self._meeting)


def _start_followers(count: int) -> list[FollowerProcess]:
    """Start `count` followers. If one of them cannot be started, none is left."""
    followers: list[FollowerProcess] = []
    try:
        for _ in range(count):
            followers.append(FollowerProcess())
    except BaseException as error:
        for follower in followers:
            follower.kill()
            follower.end(END_TIMEOUT_S)
            follower.calls.close()
        if not isinstance(error, OSError):
            raise
        raise Unavailable(
            f"the ranks of this worker cannot be started ({first_line(error)}); free memory, or allow more processes"
        ) from error
    return followers


def _check_devices(name: str, ranks: int, setting: str) -> None:
    device = parse_device(name)
    if is_cpu(device):
        return
    gpus = range(device.index, device.index + ranks)
    count = torch.cuda.device_count() - device.index
    if count < ranks:
        raise InvalidArgument(
            setting,
            f"{ranks} ranks need as many GPUs, but this process can see {count} from {device} on; use a smaller number,"
            " or give the worker more GPUs.",
        )
    for gpu, other in itertools.permutations(gpus, 2):
        if not torch.cuda.can_device_access_peer(gpu, other):
            raise InvalidArgument(
                setting, f"cuda:{gpu} cannot access the memory of cuda:{other}; use GPUs that can, or 1."
            )
