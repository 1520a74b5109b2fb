"""How the workers of a cluster share the work, and which assignment that gives to each."""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.config import ClusterConfig
from wire.errors import InvalidArgument
from wire.messages import Assignment, Role
from wire.mode import Mode
from wire.policy_name import PolicyName

_PREFILLS_FIRST = {Role.PREFILL: 0, Role.BOTH: 1, Role.DECODE: 2}


@dataclass(frozen=True, slots=True)
class Sharing:
    """A mode, how many workers prefill in it, and what steps are made of.

    `prefill` is of a disaggregated cluster: how many of the workers that are there prefill, the others decode; it is
    0, or all of them, while these stand in for the other part. `step_budget` in tokens, None = 512; `itl_target_s` in
    seconds, None = no limit.
    """

    mode: Mode
    prefill: int = 0
    step_policy: PolicyName = PolicyName.DECODE_PRIORITY
    step_budget: int | None = None
    itl_target_s: float | None = None

    @classmethod
    def of(cls, config: ClusterConfig) -> "Sharing":
        """As the cluster was started."""
        mode = Mode(config.mode)
        prefill = config.prefill if mode is Mode.DISAGGREGATED else 0
        return cls(mode, prefill, PolicyName(config.step_policy), config.step_budget, config.itl_target_s)

    def assignment(self, role: Role) -> Assignment:
        """Of a worker with this role."""
        return Assignment(role, self.step_policy, self.step_budget, self.itl_target_s)


@dataclass(frozen=True, slots=True)
class ModeChange:
    """What an operator asks for: see `SetModeRequest`, whose zeros and "" mean what they mean there."""

    mode: str
    prefill: int = 0
    decode: int = 0
    step_policy: str = ""
    step_budget: int = 0
    itl_target_s: float = 0.0
    grace_s: float = 0.0

    def over(self, now: Sharing, workers: int) -> Sharing:
        """What `workers` workers that share the work as `now` are to do. InvalidArgument names the option."""
        for option, name, known in (
            ("mode", self.mode, list(Mode)),
            ("--step-policy", self.step_policy, ["", *PolicyName]),
        ):
            if name not in known:
                raise InvalidArgument(option, f"{name!r} is none of {', '.join(each for each in known if each)}")
        if self.step_budget and self.step_policy not in {PolicyName.CHUNKED, PolicyName.DECODE_PRIORITY}:
            raise InvalidArgument("--step-budget", "is for --step-policy chunked or decode-priority; name it, too")
        target = now.itl_target_s if self.itl_target_s == 0 else max(self.itl_target_s, 0.0) or None
        steps = (now.step_policy, now.step_budget)
        if self.step_policy:
            steps = (PolicyName(self.step_policy), self.step_budget or None)
        return Sharing(Mode(self.mode), self._prefill(workers), *steps, itl_target_s=target)

    def _prefill(self, workers: int) -> int:
        """How many workers prefill."""
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


def assign(sharing: Sharing, roles: Mapping[str, Role]) -> dict[str, Assignment]:
    """An assignment for each worker; who has a role that is needed keeps it. `roles` are those of now, by worker."""
    if sharing.mode is not Mode.DISAGGREGATED:
        return {worker_id: sharing.assignment(Role.BOTH) for worker_id in roles}
    ranked = sorted(roles, key=lambda worker_id: _PREFILLS_FIRST[roles[worker_id]])
    return {
        worker_id: sharing.assignment(Role.PREFILL if number < sharing.prefill else Role.DECODE)
        for number, worker_id in enumerate(ranked)
    }
