"""The input of `tandem plan`, and the parts of its output that need no simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tandem.capacity.plan.what_if import Quantized
from tandem.capacity.plan.worker_kind import STAGES, WorkerKind
from tandem.capacity.planner.decision import Split
from tandem.capacity.planner.demand import Demand, LatencyTargets
from tandem.capacity.planner.policy import TARGET_RATIO
from tandem.capacity.planner.sizing import Sizing
from tandem.protocol.errors import InvalidArgument
from tandem.settings.planner import Limits, Range

WORKERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The input of `tandem plan`: the kinds of workers, the load to serve and its latency targets."""

    prefill: WorkerKind
    decode: WorkerKind
    """The workers that decode; equal to `prefill` if there is one kind, whose workers can do both."""
    demand: Demand
    targets: LatencyTargets
    workers: int | None = None
    """Number of workers; None = the smallest number that leaves headroom."""
    compares_stages: bool = False
    """True if `with_fewest_gpus` also tries prefill workers with pipeline stages."""
    compares_context_ranks: bool = False
    """True if `with_fewest_gpus` also tries prefill workers whose ranks divide the tokens of prompts."""

    @property
    def one_kind(self) -> bool:
        """True if all workers are of the same kind."""
        return self.prefill == self.decode

    @property
    def sizing(self) -> Sizing:
        """The demand, and the workers' costs and capacity, from which their number and split are computed."""
        demand = self.demand
        return Sizing(demand, self.targets, self.prefill.facts(demand), self.decode.facts(demand))

    def quantized_forms(self) -> Iterator[tuple[Quantized, Quantized]]:
        """Yield the quantized forms of the model on prefill workers and on decode workers."""
        return zip(self.prefill.quantized_forms(self.demand), self.decode.quantized_forms(self.demand), strict=True)

    def gpus(self, split: Split) -> int:
        """Return the number of GPUs of all workers."""
        return split.prefill * self.prefill.gpus + (split.decode + split.shared) * self.decode.gpus

    def check(self) -> None:
        """Check the input. Raises InvalidArgument if no number of workers can serve the load within its targets."""
        if self.decode.stages > 1:
            raise InvalidArgument("--prefill-pipeline-size", "decode workers have one stage; give the stages to others")
        for kind in dict.fromkeys((self.prefill, self.decode)):
            kind.check_memory(self.demand)
        self.decode.check_decode(self.demand, self.targets)
        self.prefill.check_prefill(self.demand, self.targets)

    def split(self, load_ratio: float = TARGET_RATIO) -> Split:
        """Return the best split of the given number of workers or, without a number, the smallest split with headroom.

        Headroom is left by load ratios of at most `load_ratio`. A single worker does both prefill and decode.
        """
        if self.workers is not None:
            best = self.sizing.best(self.workers, Limits(), shared=self.workers == 1)
        else:
            best = self.sizing.fewest(Range(2, WORKERS_MAX), Limits(), load_ratio)
        assert best is not None
        return best

    def with_fewest_gpus(self) -> PlanInputs:
        """Return the input with the numbers of `WorkerKind.group_sizes` that serve the load with the fewest GPUs.

        All workers of one kind have equally many. The ranks of prefill workers divide the tokens of prompts, or the
        workers have pipeline stages, if that takes fewer GPUs. If no number is sufficient, the load ratio decides.
        Raises InvalidArgument, as `check` does, if no number can serve the load within its targets.
        """
        if self.one_kind:
            pairs = [(kind, kind) for kind in self.prefill.groups()]
        else:
            pairs = [*product(self.prefill.groups(), self.decode.groups())]
        if self.compares_context_ranks:
            pairs += product(self.prefill.context_groups(), self.decode.groups())
        best = self._best(pairs)
        if not self.compares_stages:
            return best
        try:
            staged = replace(self.prefill, stages=STAGES).groups()
        except InvalidArgument:  # The model cannot be divided among stages, so there is nothing to compare.
            return best
        return self._best([(best.prefill, best.decode), *((kind, best.decode) for kind in staged)])

    def _best(self, pairs: Sequence[tuple[WorkerKind, WorkerKind]]) -> PlanInputs:
        """Return the input with the pair of kinds, for prefill and for decode, that has the least `_effort`."""
        possible = []
        refused: InvalidArgument | None = None
        for prefill, decode in pairs:
            candidate = replace(self, prefill=prefill, decode=decode)
            try:
                candidate.check()
            except InvalidArgument as error:
                refused = error
            else:
                possible.append(candidate)
        if refused is not None and not possible:
            raise refused
        return min(possible, key=PlanInputs._effort)

    def _effort(self) -> tuple[float, int]:
        """Return the load ratio as far as it exceeds what is sufficient, and the number of GPUs."""
        split = self.split()
        enough = TARGET_RATIO if self.workers is None else 1.0
        return max(self.sizing.worst(split).value, enough), self.gpus(split)
