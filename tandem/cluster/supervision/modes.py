"""The topology of a cluster: its mode, its split between roles, and the assignment that follows for each worker."""

from collections.abc import Mapping
from dataclasses import dataclass

from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import Assignment, Role
from tandem.protocol.mode import Mode
from tandem.protocol.policy_name import DEFAULT_STEP_POLICY, PolicyName
from tandem.settings.cluster import ClusterSettings

_PREFILLS_FIRST = {Role.PREFILL: 0, Role.BOTH: 1, Role.DECODE: 2}


@dataclass(frozen=True, slots=True)
class Topology:
    """A cluster's mode, the number of prefill workers, and the step settings.

    `prefill` is the number of current workers that prefill in a disaggregated cluster; the others decode. If all
    workers of one role are absent, the present workers have both roles, and `prefill` is 0 (the prefill workers are
    absent) or the number of present workers (the decode workers are absent). `step_budget` is in tokens per step, None
    = `CHUNKED_BUDGET`; `itl_target_s` is in seconds, None = no limit.
    """

    mode: Mode
    prefill: int = 0
    step_policy: PolicyName = DEFAULT_STEP_POLICY
    step_budget: int | None = None
    itl_target_s: float | None = None

    @classmethod
    def of(cls, config: ClusterSettings) -> "Topology":
        """Return the topology of the config."""
        prefill, worker = config.prefill if config.router.mode is Mode.DISAGGREGATED else 0, config.worker
        steps = worker.step_policy, worker.step_budget, worker.itl_target_s
        return cls(config.router.mode, prefill, *steps)

    def assignment(self, role: Role) -> Assignment:
        """Return the assignment of a worker with this role."""
        return Assignment(role, self.step_policy, self.step_budget, self.itl_target_s)


@dataclass(frozen=True, slots=True)
class ModeChange:
    """An operator's request for a mode; see `SetModeRequest`, which defines the meaning of zeros and ""."""

    mode: str
    prefill: int = 0
    decode: int = 0
    step_policy: str = ""
    step_budget: int = 0
    itl_target_s: float = 0.0
    grace_s: float = 0.0

    def over(self, now: Topology, workers: int) -> Topology:
        """Return the topology that results from applying this change to the topology `now`, for `workers` workers.

        Raises InvalidArgument, which names the option, for an impossible change.
        """
        for option, name, known in (
            ("mode", self.mode, list(Mode)),
            ("--step-policy", self.step_policy, ["", *PolicyName]),
        ):
            if name not in known:
                raise InvalidArgument(option, f"{name!r} is not one of {', '.join(value for value in known if value)}")
        if self.step_budget and self.step_policy not in {PolicyName.CHUNKED, PolicyName.DECODE_PRIORITY}:
            raise InvalidArgument("--step-budget", "is for --step-policy chunked or decode-priority; name it, too")
        target = now.itl_target_s if self.itl_target_s == 0 else max(self.itl_target_s, 0.0) or None
        steps = (now.step_policy, now.step_budget)
        if self.step_policy:
            steps = (PolicyName(self.step_policy), self.step_budget or None)
        return Topology(Mode(self.mode), self._prefill(workers), *steps, target)

    def _prefill(self, workers: int) -> int:
        if self.mode != Mode.DISAGGREGATED:
            if self.prefill or self.decode:
                raise InvalidArgument("--prefill" if self.prefill else "--decode", "is for mode disaggregated")
            return 0
        if workers < 2:
            raise InvalidArgument("mode", f"disaggregated takes two workers, and {workers} serves; start more of them")
        prefill = self.prefill or (workers - self.decode if self.decode else workers // 2)
        decode = self.decode or workers - prefill
        if prefill < 1 or decode < 1 or prefill + decode != workers:
            raise InvalidArgument(
                "--prefill", f"{prefill} that prefill and {decode} that decode are not the {workers} workers that serve"
            )
        return prefill


def assign(topology: Topology, roles: Mapping[str, Role]) -> dict[str, Assignment]:
    """Return each worker's assignment; a worker keeps its current role, given in `roles`, if that role is needed."""
    if topology.mode is not Mode.DISAGGREGATED:
        return {worker_id: topology.assignment(Role.BOTH) for worker_id in roles}
    ranked = sorted(roles, key=lambda worker_id: _PREFILLS_FIRST[roles[worker_id]])
    return {
        worker_id: topology.assignment(Role.PREFILL if number < topology.prefill else Role.DECODE)
        for number, worker_id in enumerate(ranked)
    }
