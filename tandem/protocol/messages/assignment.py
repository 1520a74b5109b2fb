"""The assignment of a worker: its role and its step policy."""

from dataclasses import dataclass
from enum import StrEnum

from tandem.protocol.errors import InvalidArgument
from tandem.protocol.policy_name import DEFAULT_STEP_POLICY, PolicyName


class Role(StrEnum):
    """The role of a worker: which of its schedulers accept work, prefill, decode or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        """True if the role includes prefill."""
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        """True if the role includes decode."""
        return self is not Role.PREFILL

    def __or__(self, other: "Role") -> "Role":
        """Return the role that includes the phases of both roles."""
        return self if self is other else Role.BOTH

    def without(self, other: "Role") -> "Role | None":
        """Return this role without the phases of `other`; None if no phase is left."""
        if other is Role.BOTH or self is other:
            return None
        if self is Role.BOTH:
            return Role.DECODE if other is Role.PREFILL else Role.PREFILL
        return self


@dataclass(frozen=True, slots=True)
class Assignment:
    """The role and the step policy of a worker, valid until it gets the next assignment.

    `step_budget` is in tokens per step, None = `CHUNKED_BUDGET`; `itl_target_s` is in seconds, None = no limit.
    """

    role: Role
    step_policy: PolicyName = DEFAULT_STEP_POLICY
    step_budget: int | None = None
    itl_target_s: float | None = None

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidArgument, which names the field and its limit, for a value out of range."""
        if self.step_budget is not None and self.step_budget < 1:
            raise InvalidArgument("step_budget", f"{self.step_budget} is less than 1")
        if self.itl_target_s is not None and not self.itl_target_s > 0:
            raise InvalidArgument("itl_target_s", f"{self.itl_target_s:g} is not above 0")

    @property
    def steps(self) -> str:
        """The step policy and its limits, as text."""
        limits = [] if self.step_budget is None else [f"{self.step_budget}"]
        limits += [] if self.itl_target_s is None else [f"{1e3 * self.itl_target_s:g} ms"]
        return " ".join([self.step_policy, *limits])
