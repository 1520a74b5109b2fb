"""Loads with a known bottleneck, and the cluster settings under which each meets it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.cli.load.workload import Arrival, Block, Workload
from tandem.metrics.bottlenecks import Bottleneck
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.settings.engine import GIB


@dataclass(frozen=True, slots=True)
class Load:
    """Equal requests that make `bottleneck` the bottleneck of the worker whose role includes `half`."""

    name: str
    bottleneck: Bottleneck
    half: Role
    """The worker's role: PREFILL or DECODE."""
    requests: int
    prompt: int
    """Tokens of each prompt; no two prompts share a prefix."""
    answer: int
    """Tokens of each answer."""
    every_s: float = 0.0
    """Interval between arrivals in seconds; 0 = all arrive at once."""

    @property
    def begun(self) -> int:
        """Number of requests at the router from which on the load has begun: half of a burst."""
        return 1 if self.every_s else -(-self.requests // 2)

    def workload(self, seconds: float, seed: int) -> Workload:
        """Returns the requests that are due within `seconds`."""
        due = [number * self.every_s for number in range(self.requests)]
        arrivals = tuple(Arrival(at, (Block(i, self.prompt),), self.answer) for i, at in enumerate(due) if at < seconds)
        return Workload(self.name, len(arrivals) / seconds, seconds, seed, arrivals)


@dataclass(frozen=True, slots=True)
class Stage:
    """A device's cluster and its loads. Each load is observed for `look_s` seconds, `settle_s` after it began."""

    settings: Mapping[str, object]
    """Fields of `ClusterSettings`."""
    dtype: str
    loads: tuple[Load, ...]
    settle_s: float
    look_s: float
    workers: int | None = None
    """Number of workers where the loads need it: 1 of both roles, or 2 of one role each."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the cluster's processes."""

    @property
    def load_s(self) -> float:
        """Duration of a load in seconds: until the end of the observation, and half a second more."""
        return self.settle_s + self.look_s + 0.5


_GPU_LOADS = (
    Load("long prompts", Bottleneck.COMPUTE, Role.PREFILL, requests=100, prompt=4000, answer=1),
    Load("long answers", Bottleneck.BANDWIDTH, Role.DECODE, requests=64, prompt=128, answer=900),
    Load("more context than pages", Bottleneck.KV_CAPACITY, Role.DECODE, requests=100, prompt=2000, answer=2000),
    Load("more answers than rows", Bottleneck.QUEUE, Role.DECODE, requests=128, prompt=128, answer=640),
    Load("next to nothing", Bottleneck.NONE, Role.DECODE, requests=100, prompt=128, answer=8, every_s=0.5),
)
"""Loads for an 8B shape on an H200: a step of 64 requests takes 6 ms, and ten long prompts take a second."""
_CPU_LOADS = (
    Load("long prompts", Bottleneck.COMPUTE, Role.PREFILL, requests=40, prompt=800, answer=1),
    Load("long answers", Bottleneck.BANDWIDTH, Role.DECODE, requests=2, prompt=16, answer=600),
    Load("more context than pages", Bottleneck.KV_CAPACITY, Role.DECODE, requests=12, prompt=600, answer=1000),
    Load("more answers than rows", Bottleneck.QUEUE, Role.DECODE, requests=40, prompt=16, answer=120),
    Load("next to nothing", Bottleneck.NONE, Role.DECODE, requests=100, prompt=16, answer=3, every_s=2.0),
)
"""Loads for a 135M model in float32 on two cores."""

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
"""Stages by device: KV pages for half of the longest batch, and a batch that a hundred requests exceed."""

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
"""Bottlenecks that a GPU does not meet by its load alone.

Transport: half a gigabyte of KV per prompt of an 8B shape over TCP takes several times as long as computing it. There
are pages for eight prompts, which share the transport; at 0.4 GB/s the first ones arrive during the observation. Host:
steps of one short prompt, for a model (0.6B) so small that launching its kernels takes longer than reading its weights.
"""


def settings_for(stage: Stage, device: str, workers: int) -> dict[str, object]:
    """Returns fields of `ClusterSettings` for one worker of both roles, or for one of each role."""
    roles = {"mode": Mode.COLOCATED, "workers": 1} if workers == 1 else {"mode": Mode.DISAGGREGATED}
    return {**stage.settings, **roles, "device": device, "dtype": stage.dtype}


def worker_of(half: Role, workers: int) -> str:
    """Returns the name of the worker whose role includes `half`."""
    return f"{Role.BOTH if workers == 1 else half}-0"
