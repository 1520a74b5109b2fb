"""Advice for a symptom of slow or expensive serving: the wall, and techniques in the order in which to try them.

Each technique has the gain that the roofline predicts for the model and the GPU, and the trap: when it does not help.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from tandem.capacity.plan.memory import OVERHEAD_BYTES
from tandem.capacity.plan.speculation import Drafting
from tandem.capacity.plan.worker_kind import SETTINGS, WorkerKind
from tandem.capacity.planner.demand import Demand
from tandem.capacity.planner.load_ratio import busy_cap
from tandem.capacity.simulation.hardware import ITEM_BYTES
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork, chunk_pairs
from tandem.engine.memory import GIB
from tandem.engine.model_sizes import model_sizes
from tandem.metrics.bottlenecks import Bottleneck
from tandem.protocol.errors import InvalidArgument

_MS = 1e3
_PREFIX = 0.5
"""The fraction of cached prompt tokens for which the gain of the prefix cache is predicted."""
_UTILIZATION = (
    "a GPU utilization of 100 % only says that some kernel ran; the shares of arithmetic and bandwidth of `tandem why`"
    " name the wall"
)
_QUALITY = "fewer bits change answers; `python -m benchmarks.quality` of the source distribution compares them"


_LEAST_GAIN = 1.05
"""The smallest predicted gain for which fewer bits are listed: the roofline's error is larger than smaller gains."""


class Symptom(StrEnum):
    """A complaint of a user, from which `tandem advise` starts; its value is the text that the user types."""

    FIRST_TOKEN = "first token slow"
    STREAM = "stream slow"
    MEMORY = "does not fit"
    COST = "bill"
    RAG = "RAG slow"

    @classmethod
    def parse(cls, text: str) -> Symptom:
        """Return the symptom that has this name or one of its words. Raises InvalidArgument, which lists the names."""
        words = {word for word in text.lower().replace("-", " ").split() if word not in _COMMON_WORDS}
        named = [symptom for symptom, own in _WORDS.items() if words & own]
        if len(named) != 1:
            known = ", ".join(f'"{symptom}"' for symptom in cls)
            raise InvalidArgument("SYMPTOM", f"{text!r} is not one of {known}")
        return named[0]


_COMMON_WORDS = frozenset({"slow", "does", "not", "the", "token", "is", "high", "too", "of"})
_WORDS = {
    Symptom.FIRST_TOKEN: {"first", "ttft", "prefill"},
    Symptom.STREAM: {"stream", "itl", "tpot", "decode", "tokens"},
    Symptom.MEMORY: {"fit", "memory", "oom", "kv"},
    Symptom.COST: {"bill", "cost", "price", "expensive"},
    Symptom.RAG: {"rag", "retrieval", "documents"},
}
SYMPTOM_OF = {
    Bottleneck.COMPUTE: Symptom.FIRST_TOKEN,
    Bottleneck.QUEUE: Symptom.FIRST_TOKEN,
    Bottleneck.BANDWIDTH: Symptom.STREAM,
    Bottleneck.KV_CAPACITY: Symptom.MEMORY,
}
"""The symptom of a bottleneck of a running worker; the others have the advice of `tandem why` alone."""


@dataclass(frozen=True, slots=True)
class Technique:
    """A technique, the gain that is predicted for it, and its trap."""

    name: str
    gain: str
    trap: str


@dataclass(frozen=True, slots=True)
class Advice:
    """The wall that a symptom points to, and the techniques against it, the first to try first."""

    wall: str
    techniques: tuple[Technique, ...]


@dataclass(frozen=True, slots=True)
class Adviser:
    """Predicts the gains for workers of one kind, a load, and `batch` requests that a worker decodes at once."""

    kind: WorkerKind
    demand: Demand
    batch: int

    def advice(self, symptom: Symptom) -> Advice:
        """Return the advice for a symptom."""
        walls: dict[Symptom, Callable[[], str]] = {
            Symptom.FIRST_TOKEN: self._prefill_wall,
            Symptom.STREAM: self._decode_wall,
            Symptom.MEMORY: self._memory_wall,
            Symptom.COST: self._cost_wall,
            Symptom.RAG: self._prefill_wall,
        }
        techniques: dict[Symptom, Callable[[], Iterator[Technique]]] = {
            Symptom.FIRST_TOKEN: self._for_first_token,
            Symptom.STREAM: self._for_stream,
            Symptom.MEMORY: self._for_memory,
            Symptom.COST: self._for_cost,
            Symptom.RAG: self._for_rag,
        }
        return Advice(walls[symptom](), tuple(techniques[symptom]()))

    # ---- walls ----

    def _prefill_wall(self) -> str:
        tokens, cost = int(self.demand.computed_tokens), StepCost(self.kind.costs)
        sizes = model_sizes(self.kind.model, ITEM_BYTES, self.kind.kv_element_bytes)
        flops = sizes.step_flops(StepWork(tokens, chunk_pairs(tokens, int(self.demand.prompt_tokens) - tokens)))
        wall = "compute" if tokens > cost.parameters.free_tokens else "memory bandwidth"
        busy = self.demand.per_s * self._busy_s(self.kind, self.demand)
        return (
            f"{wall}: a prompt of {tokens:,} computed tokens has {flops / 1e12:.1f} TFLOP and takes"
            f" {self._prompt_s(self.kind, self.demand) * _MS:.0f} ms alone; {self.demand.per_s:g} such prompts a second"
            f" keep {busy:.2g} workers busy, and the rest of a longer TTFT is waiting"
        )

    def _decode_wall(self) -> str:
        sizes = model_sizes(self.kind.model, ITEM_BYTES, self.kind.kv_element_bytes)
        context = round(self.demand.context_tokens)
        weights = sizes.weight_bytes + sizes.expert_bytes_read(self.batch)
        kv = sizes.context_bytes(self.batch, self.batch * context)
        step_s = self._step_s(self.kind)
        return (
            f"memory bandwidth: a step of {self.batch} requests takes {step_s * _MS:.1f} ms and reads"
            f" {weights / GIB:.1f} GiB of weights and {kv / GIB:.1f} GiB of KV;"
            f" the {'KV is' if kv > weights else 'weights are'} the larger part"
        )

    def _memory_wall(self) -> str:
        memory = self.kind.memory(self.demand)
        return (
            f"memory capacity: of {memory.device_bytes / GIB:.0f} GiB, weights take {memory.weight_bytes / GIB:.1f} and"
            f" the rest of the worker {OVERHEAD_BYTES / GIB:.0f}; {memory.kv_tokens:,.0f} tokens of KV remain,"
            f" {memory.kv_tokens / self.demand.kv_tokens:.1f} requests of {self.demand.kv_tokens:,.0f} tokens"
        )

    def _cost_wall(self) -> str:
        return (
            f"throughput of a GPU: a request takes {self._gpu_seconds(self.kind, self.demand, self.batch) * _MS:.0f} ms"
            f" of it, in a batch of {self.batch}"
        )

    # ---- techniques ----

    def _for_first_token(self) -> Iterator[Technique]:
        each_s = self._busy_s(self.kind, self.demand)
        cap = busy_cap(1, each_s, 1.0)
        yield Technique(
            "one more prefill worker, if prompts wait",
            f"with a TTFT target of 1 s, a worker takes {cap / each_s:.3g} prompts a second, {cap:.0%} of what it could"
            " compute",
            _UTILIZATION,
        )
        yield self._prefix_cache()
        yield from self._faster_prompts()
        yield Technique(
            "larger chunks: `--step-budget`",
            "prompts take fewer mixed steps, and each reads the weights once",
            "gaps between tokens grow with the step; name targets with `--slo-class` instead",
        )
        yield Technique(
            "speculative decoding: not for this",
            "none: it makes decode steps shorter",
            "a smaller KV, as with GQA, does not shorten prompts either: their time is the products with the weights",
        )

    def _for_stream(self) -> Iterator[Technique]:
        yield from self._fewer_bits(self._step_s, "steps")
        yield self._speculation()
        yield from self._ranks(self._step_s, "steps")
        prompt_s = self._prompt_s(self.kind, self.demand)
        yield Technique(
            "prefill on workers of its own, or an ITL target, if gaps are uneven",
            f"a prompt that is computed whole makes a gap of {prompt_s * _MS:.0f} ms",
            "the KV must reach the decode worker: `tandem plan --network-gbps` has the time",
        )

    def _for_memory(self) -> Iterator[Technique]:
        for name, kind in self.kind.narrower_kinds():
            memory = kind.memory(self.demand)
            yield Technique(name, f"{memory.kv_tokens:,.0f} tokens of KV a worker", _QUALITY)
        for ranks in (2, 4, 8):
            if (divided := self._with_ranks(ranks)) is not None:
                memory = divided.memory(self.demand)
                yield Technique(
                    f"--tensor-parallel-size {ranks}",
                    f"{memory.weight_bytes / GIB:.1f} GiB of weights on each GPU, {memory.kv_tokens:,.0f} tokens of KV",
                    "each layer waits for the exchange between the GPUs; without NVLink it is slow",
                )
        yield Technique(
            "a shorter --max-context, or fewer requests at once",
            f"a request of {self.demand.kv_tokens:,.0f} tokens holds"
            f" {self.demand.kv_tokens * self.kind.memory(self.demand).kv_bytes_per_token / GIB:.2f} GiB of KV",
            "a smaller model or one with GQA is a model with other answers; GQA shrinks the KV, not the weights",
        )

    def _for_cost(self) -> Iterator[Technique]:
        now_s, larger = self._gpu_seconds(self.kind, self.demand, self.batch), 2 * self.batch
        yield Technique(
            f"batches of {larger} requests instead of {self.batch}: fewer workers",
            f"{now_s / self._gpu_seconds(self.kind, self.demand, larger):.2f} times as many requests a GPU",
            f"the step grows from {self._step_s(self.kind) * _MS:.1f} to"
            f" {self._step_s(self.kind, larger) * _MS:.1f} ms; {_UTILIZATION}",
        )
        yield self._prefix_cache()
        for name, kind in self.kind.narrower_kinds():
            gain = now_s / self._gpu_seconds(kind, self.demand, self.batch)
            if gain >= _LEAST_GAIN:
                yield Technique(name, f"{gain:.2f} times as many requests a GPU", _QUALITY)
        yield self._speculation()

    def _for_rag(self) -> Iterator[Technique]:
        yield self._prefix_cache()
        long = int(self.demand.prompt_tokens)
        cost = StepCost(self.kind.costs)
        attention = cost.parameters.pair_s * chunk_pairs(long, 0) / self._prompt_s(self.kind, self.demand)
        yield Technique(
            "fewer or shorter documents",
            f"half of the tokens take {self._half():.2f} of the time; attention is {attention:.0%} of it",
            "attention grows with the square of the prompt only where it is the larger part",
        )
        if (context := self._with_context_ranks(2)) is not None:
            yield Technique(
                "--prefill-context-parallel-size 2",
                f"{self._prompt_s(self.kind, self.demand) / self._prompt_s(context, self.demand):.2f} times as fast",
                "it takes a second GPU with the whole model, and prompts of many tokens",
            )
        yield from self._faster_prompts()

    # ---- parts ----

    def _prefix_cache(self) -> Technique:
        cached = replace(self.demand, cached=self.demand.cached + (1 - self.demand.cached) * _PREFIX)
        gain = self._prompt_s(self.kind, self.demand) / self._prompt_s(self.kind, cached)
        return Technique(
            "common parts first in prompts, for the prefix cache",
            f"{gain:.2f} times as fast if half of the computed tokens were cached",
            "a date, a name or documents in another order at the beginning make the rest of the prompt a new one",
        )

    def _faster_prompts(self) -> Iterator[Technique]:
        yield from self._fewer_bits(lambda kind: self._prompt_s(kind, self.demand), "prompts")
        yield from self._ranks(lambda kind: self._prompt_s(kind, self.demand), "prompts")

    def _fewer_bits(self, seconds: Callable[[WorkerKind], float], what: str) -> Iterator[Technique]:
        for name, kind in self.kind.narrower_kinds():
            gain = seconds(self.kind) / seconds(kind)
            if gain >= _LEAST_GAIN:
                yield Technique(name, f"{what} {gain:.2f} times as fast", _QUALITY)

    def _ranks(self, seconds: Callable[[WorkerKind], float], what: str) -> Iterator[Technique]:
        kind = self._with_ranks(2)
        if kind is not None:
            gain = seconds(self.kind) / seconds(kind)
            yield Technique(
                "--tensor-parallel-size 2",
                f"{what} {gain:.2f} times as fast on twice as many GPUs",
                "below 2 it costs throughput; without NVLink the exchange is slow",
            )

    def _speculation(self) -> Technique:
        drafting, cost = Drafting.parse("0.7,3"), StepCost(self.kind.costs)
        context = round(self.demand.context_tokens)
        return Technique(
            "--speculate",
            f"{drafting.speedup(cost, self.batch, context):.2f} times as fast at {self.batch} requests with 3 drafts of"
            " which 0.7 are accepted",
            f"it does not pay from {drafting.break_even(cost, context)} requests at once on: the step has no free"
            " arithmetic then",
        )

    def _with_ranks(self, ranks: int) -> WorkerKind | None:
        """Return the workers with `ranks` GPUs; None if they have as many already, or if the model is not divisible."""
        if self.kind.gpus >= ranks:
            return None
        try:
            (kind,) = replace(self.kind, gpus=ranks, group_sizes=()).groups()
        except InvalidArgument:
            return None
        return kind

    def _with_context_ranks(self, ranks: int) -> WorkerKind | None:
        return next((kind for kind in self.kind.context_groups() if kind.context_ranks == ranks), None)

    def _half(self) -> float:
        half = replace(self.demand, prompt_tokens=self.demand.prompt_tokens / 2)
        return self._prompt_s(self.kind, half) / self._prompt_s(self.kind, self.demand)

    def _prompt_s(self, kind: WorkerKind, demand: Demand) -> float:
        return demand.lone_prompt_seconds(StepCost(kind.costs), kind.step_tokens)

    def _busy_s(self, kind: WorkerKind, demand: Demand) -> float:
        return demand.prompt_seconds(StepCost(kind.costs), SETTINGS.max_step_tokens)

    def _step_s(self, kind: WorkerKind, batch: int | None = None) -> float:
        rows = batch or self.batch
        return StepCost(kind.costs).decode_step_seconds(rows, rows * round(self.demand.context_tokens))

    def _gpu_seconds(self, kind: WorkerKind, demand: Demand, batch: int) -> float:
        """Return the seconds of a GPU that a request takes: its prompt, and its share of the decode steps."""
        decoding_s = demand.answer_tokens * self._step_s(kind, batch) / batch
        return kind.gpus * (self._busy_s(kind, demand) + decoding_s)
