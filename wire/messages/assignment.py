"""What a worker is told to do: which halves are open, and what their steps are made of."""

from dataclasses import dataclass
from enum import StrEnum

from wire.errors import InvalidArgument
from wire.policy_name import PolicyName


class Role(StrEnum):
    """Which halves of a worker take work."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL

    def __or__(self, other: "Role") -> "Role":
        """The halves of both."""
        return self if self is other else Role.BOTH

    def without(self, other: "Role") -> "Role | None":
        """Its halves but those of `other`; None = none is left."""
        if other is Role.BOTH or self is other:
            return None
        if self is Role.BOTH:
            return Role.DECODE if other is Role.PREFILL else Role.PREFILL
        return self


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a worker does until it is told otherwise: which halves take work, and what its steps are made of.

    `step_budget` in tokens, None = 512; `itl_target_s` in seconds, None = no limit.
    """

    role: Role
    step_policy: PolicyName = PolicyName.DECODE_PRIORITY
    step_budget: int | None = None
    itl_target_s: float | None = None

    def __post_init__(self) -> None:
        """InvalidArgument names the field and its limit."""
        if self.step_budget is not None and self.step_budget < 1:
            raise InvalidArgument("step_budget", f"{self.step_budget} is less than 1")
        if self.itl_target_s is not None and not self.itl_target_s > 0:
            raise InvalidArgument("itl_target_s", f"{self.itl_target_s:g} is not above 0")

    @property
    def steps(self) -> str:
        """How its steps are made, in words."""
        limits = [] if self.step_budget is None else [f"{self.step_budget}"]
        limits += [] if self.itl_target_s is None else [f"{1e3 * self.itl_target_s:g} ms"]
        return " ".join([self.step_policy, *limits])
