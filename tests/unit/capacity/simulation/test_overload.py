"""Ten times the capacity of small clusters: admitted requests keep their TTFT target; rejections end with the load."""

import random
from typing import Any

import pytest

from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.settings.slo import SloClass
from tests.unit.capacity.simulation.stages import NETWORK, cluster, request

TARGET = SloClass("interactive", ttft_s=1.0, itl_s=0.1)
STAGES = {
    "few pages": (Mode.DISAGGREGATED, [Role.PREFILL, Role.DECODE], 256),
    "few slots": (Mode.DISAGGREGATED, [Role.PREFILL, Role.DECODE], 4096),
    "one worker": (Mode.COLOCATED, [Role.BOTH], 512),
    "two workers": (Mode.ADAPTIVE, [Role.BOTH, Role.BOTH], 512),
}
OVERLOAD_S, AFTER_S, RECOVERY_S = 10.0, 6.0, 5.0
LATE_SHARE_MAX = 0.05
"""Measured: 0 to 0.03. Without the time until a decode worker has capacity: 0.74 to 0.90."""


def arrivals(dice: random.Random, start_s: float, seconds: float, rate: float) -> list[Any]:
    at, made = start_s, []
    while (at := at + dice.expovariate(rate)) < start_s + seconds:
        made.append(request(at, 128, answer(dice), key=round(1e6 * at), slo=TARGET))
    return made


def answer(dice: random.Random) -> int:
    return max(2, round(dice.lognormvariate(4.16, 0.3)))


@pytest.mark.parametrize("stage", STAGES)
def test_admitted_requests_keep_their_targets_at_ten_times_the_capacity(stage: str) -> None:
    mode, roles, pages = STAGES[stage]
    dice = random.Random(0)
    burst = [request(0.0, 128, answer(dice), key=number) for number in range(200)]
    rate = len(burst) / max(outcome.ended_s for outcome in cluster(mode, roles, pages=pages).run(burst))
    warm = [request(0.0, 128, 64, key=number) for number in range(8)]
    over = arrivals(dice, 5.0, OVERLOAD_S, 10 * rate)
    after = arrivals(dice, 5.0 + OVERLOAD_S, AFTER_S, 0.5 * rate)
    outcomes = {id(o.asked): o for o in cluster(mode, roles, pages=pages).run([*warm, *over, *after])}

    def late(asked: Any) -> bool:
        outcome = outcomes[id(asked)]
        return bool(outcome.error) or outcome.token_s(NETWORK.event_s)[0] - asked.due_s > TARGET.ttft_s

    refused = [asked for asked in over if outcomes[id(asked)].error]
    assert {outcomes[id(asked)].error for asked in refused} == {"RESOURCE_EXHAUSTED"}
    assert all(outcomes[id(asked)].ended_s == pytest.approx(asked.due_s + NETWORK.ingress_s) for asked in refused)
    admitted = [asked for asked in over if not outcomes[id(asked)].error]
    assert sum(map(late, admitted)) <= LATE_SHARE_MAX * len(admitted)
    assert len(admitted) > 0.8 * rate * OVERLOAD_S, "the capacity is used"
    assert max((asked.due_s - 5.0 - OVERLOAD_S for asked in after if late(asked)), default=0.0) < RECOVERY_S
