"""The loads, and the cluster whose sizes make each of them meet its bottleneck."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.load.workload import Arrival, Block, Workload
from cluster.config import GIB
from telemetry.bottlenecks import Bottleneck
from wire.messages import Role
from wire.mode import Mode


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one kind; `bottleneck` is what has to bind the worker that does `half` of the work."""

    name: str
    bottleneck: Bottleneck
    half: Role
    """PREFILL or DECODE."""
    requests: int
    prompt: int
    """Tokens of each prompt; no two share a prefix."""
    answer: int
    """Tokens of each answer."""
    every_s: float = 0.0
    """Between two arrivals, in seconds; 0 = all of them come at once."""

    @property
    def begun(self) -> int:
        """Requests at the router from which on the load is there: half of a burst."""
        return 1 if self.every_s else -(-self.requests // 2)

    def workload(self, seconds: float, seed: int) -> Workload:
        """What of it is due within `seconds`."""
        due = [number * self.every_s for number in range(self.requests)]
        arrivals = tuple(Arrival(at, (Block(i, self.prompt),), self.answer) for i, at in enumerate(due) if at < seconds)
        return Workload(self.name, len(arrivals) / seconds, seconds, seed, arrivals)


@dataclass(frozen=True, slots=True)
class Stage:
    """A device's cluster and its loads. A load is looked at for `look_s` seconds, `settle_s` after it
    has begun.
    """

    settings: Mapping[str, object]
    """Fields of `ClusterConfig`."""
    dtype: str
    loads: tuple[Load, ...]
    settle_s: float
    look_s: float
    workers: int | None = None
    """1 that does everything or 2 of one role each, where its loads need that."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the cluster's processes."""

    @property
    def load_s(self) -> float:
        """How long a load lasts: to the end of the look, and a little more."""
        return self.settle_s + self.look_s + 0.5


_GPU_LOADS = (
    Load("long prompts", Bottleneck.COMPUTE, Role.PREFILL, requests=100, prompt=4000, answer=1),
    Load("long answers", Bottleneck.BANDWIDTH, Role.DECODE, requests=64, prompt=128, answer=900),
    Load("more context than pages", Bottleneck.KV_CAPACITY, Role.DECODE, requests=100, prompt=2000, answer=2000),
    Load("more answers than rows", Bottleneck.QUEUE, Role.DECODE, requests=128, prompt=128, answer=640),
    Load("next to nothing", Bottleneck.NONE, Role.DECODE, requests=100, prompt=128, answer=8, every_s=0.5),
)
"""Of an 8B shape on an H200: a batch of 64 takes some 6 ms a step, a second computes ten of the long prompts."""
_CPU_LOADS = (
    Load("long prompts", Bottleneck.COMPUTE, Role.PREFILL, requests=40, prompt=800, answer=1),
    Load("long answers", Bottleneck.BANDWIDTH, Role.DECODE, requests=2, prompt=16, answer=600),
    Load("more context than pages", Bottleneck.KV_CAPACITY, Role.DECODE, requests=12, prompt=600, answer=1000),
    Load("more answers than rows", Bottleneck.QUEUE, Role.DECODE, requests=40, prompt=16, answer=120),
    Load("next to nothing", Bottleneck.NONE, Role.DECODE, requests=100, prompt=16, answer=3, every_s=2.0),
)
"""Of a 135M model in float32 on two cores."""

STAGES = {
    "cuda": Stage(
        {"page_tokens": 128, "kv_cache_bytes": 16 * GIB, "max_batch_requests": 64},
        "bfloat16",
        _GPU_LOADS,
        settle_s=1.0,
        look_s=2.0,
    ),
    "cpu": Stage(
        {"page_tokens": 16, "kv_cache_bytes": GIB // 4, "max_batch_requests": 4, "max_step_tokens": 512},
        "float32",
        _CPU_LOADS,
        settle_s=3.0,
        look_s=5.0,
    ),
}
"""By device: pages for half of what the longest batch needs, and a batch that a hundred requests overfill."""

MADE_NARROW = {
    "wire": Stage(
        {"page_tokens": 128, "kv_cache_bytes": 4 * GIB, "trusted_network": True},
        "bfloat16",
        (Load("long hand-overs", Bottleneck.TRANSFER, Role.PREFILL, requests=100, prompt=4000, answer=8),),
        settle_s=3.0,
        look_s=9.0,
        workers=2,
        environment={"UCX_TLS": "tcp,cuda_copy"},
    ),
    "host": Stage(
        {"page_tokens": 128, "kv_cache_bytes": 4 * GIB, "max_step_tokens": 64},
        "bfloat16",
        (Load("tiny steps", Bottleneck.HOST, Role.PREFILL, requests=4000, prompt=60, answer=1, every_s=0.002),),
        settle_s=1.0,
        look_s=2.0,
        workers=1,
    ),
}
"""Bottlenecks that a GPU does not meet by its load alone: half a gigabyte for each prompt of an 8B shape by TCP, which takes
several times as long as computing it, with pages for eight of them, who share the wire, so that at 0.4 GB/s the first
ones arrive in the look; and steps of one short prompt, of a model so small that launching its kernels takes longer than
reading its weights (0.6B).
"""


def settings_for(stage: Stage, device: str, workers: int) -> dict[str, object]:
    """Fields of `ClusterConfig`: one worker that does everything, or one of each role."""
    roles = {"mode": Mode.COLOCATED, "workers": 1} if workers == 1 else {"mode": Mode.DISAGGREGATED}
    return {**stage.settings, **roles, "device": device, "dtype": stage.dtype}


def worker_of(half: Role, workers: int) -> str:
    """The name of the one that does this half of the work."""
    return f"{Role.BOTH if workers == 1 else half}-0"
