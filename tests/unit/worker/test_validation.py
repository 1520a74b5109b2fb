"""The worker's own listener: one bad request never reaches the engine."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.config import EngineConfig
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import (
    Destination,
    Lease,
    PeerRef,
    PrefillTask,
    RequestRef,
    Reservation,
    Role,
    SamplingParams,
)
from tandem.worker.assignment import decode_batch
from tandem.worker.validation import check_prefill, check_reservation
from tests.fake_engine import FACTS

GOOD = Reservation("r", RequestRef("q", 1), (1, 2, 3), SamplingParams(max_tokens=4), PeerRef("p", 1))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"router_id": ""}, "router_id"),
        ({"ref": RequestRef("", 1)}, "request_id"),
        ({"ref": RequestRef("x" * 257, 1)}, "request_id"),
        ({"ref": RequestRef("q", 0)}, "attempt"),
        ({"cache_salt": "x" * 513}, "cache_salt"),
        ({"retention_s": -1.0}, "retention_s"),
        ({"retention_s": math.nan}, "retention_s"),
        ({"retention_s": 86401.0}, "retention_s"),
        ({"hinted_s": 86401.0}, "hinted_s"),
        ({"prior_output_tokens": 3}, "prior_output_tokens"),
        ({"prior_output_tokens": 2, "sampling": SamplingParams(max_tokens=2)}, "prior_output_tokens"),
        ({"prompt_token_ids": ()}, "prompt_token_ids"),
        ({"prompt_token_ids": (1, FACTS.vocab_size)}, "prompt_token_ids"),
        ({"prompt_token_ids": (1,) * FACTS.max_context}, "prompt_token_ids"),
        ({"sampling": SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"sampling": SamplingParams(1, temperature=-0.1)}, "temperature"),
        ({"sampling": SamplingParams(1, temperature=math.nan)}, "temperature"),
        ({"sampling": SamplingParams(1, temperature=math.inf)}, "temperature"),
        ({"sampling": SamplingParams(1, top_p=0.0)}, "top_p"),
        ({"sampling": SamplingParams(1, top_p=1.1)}, "top_p"),
        ({"sampling": SamplingParams(1, top_p=math.nan)}, "top_p"),
        ({"sampling": SamplingParams(1, min_p=-1.0)}, "min_p"),
        ({"sampling": SamplingParams(1, min_p=math.nan)}, "min_p"),
        ({"sampling": SamplingParams(1, frequency_penalty=2.5)}, "frequency_penalty"),
        ({"sampling": SamplingParams(1, presence_penalty=math.nan)}, "presence_penalty"),
        ({"sampling": SamplingParams(1, repetition_penalty=0.0)}, "repetition_penalty"),
        ({"sampling": SamplingParams(1, repetition_penalty=math.inf)}, "repetition_penalty"),
        ({"sampling": SamplingParams(1, logprobs=21)}, "logprobs"),
        ({"sampling": SamplingParams(1, prompt_logprobs=21)}, "prompt_logprobs"),
        ({"sampling": SamplingParams(1, logit_bias=((FACTS.vocab_size, 1.0),))}, "logit_bias"),
        ({"sampling": SamplingParams(1, logit_bias=((1, 101.0),))}, "logit_bias"),
        ({"sampling": SamplingParams(1, logit_bias=((1, math.nan),))}, "logit_bias"),
        ({"sampling": SamplingParams(1, logit_bias=((1, 1.0),) * 1025)}, "logit_bias"),
        ({"sampling": SamplingParams(1, stop_token_ids=(FACTS.vocab_size,))}, "stop_token_ids"),
    ],
)
def test_both_listeners_name_the_field(change: dict[str, Any], field: str) -> None:
    bad = replace(GOOD, **change)
    task = PrefillTask(
        bad.router_id,
        bad.ref,
        bad.prompt_token_ids,
        bad.sampling,
        None,
        prior_output_tokens=bad.prior_output_tokens,
        cache_salt=bad.cache_salt,
        retention_s=bad.retention_s,
        hinted_s=bad.hinted_s,
    )
    for check in (
        lambda: check_reservation(bad, FACTS),
        lambda: check_prefill(task, FACTS),
    ):
        with pytest.raises(InvalidArgument) as caught:
            check()
        assert caught.value.field == field


@pytest.mark.parametrize("prior_output_tokens", [0, 2])
def test_only_a_prompt_whose_next_token_is_the_last_needs_no_destination(prior_output_tokens: int) -> None:
    last = PrefillTask(
        "r",
        RequestRef("q", 1),
        (1, 2, 3),
        SamplingParams(prior_output_tokens + 1),
        None,
        prior_output_tokens=prior_output_tokens,
    )
    check_prefill(last, FACTS)
    for more in (2, 3):
        with pytest.raises(InvalidArgument, match="destination"):
            check_prefill(replace(last, sampling=SamplingParams(prior_output_tokens + more)), FACTS)
    there = Destination(PeerRef("d", 1), "d:1", Lease("q", 1, 1))
    check_prefill(replace(last, sampling=SamplingParams(prior_output_tokens + 2), destination=there), FACTS)


@pytest.mark.parametrize("target_s", [0.0, -1.0, math.nan])
def test_a_gap_target_is_above_nothing(target_s: float) -> None:
    with pytest.raises(InvalidArgument, match="gap_target_s"):
        check_reservation(replace(GOOD, gap_target_s=target_s), FACTS)


def test_the_longest_prompt_is_fine() -> None:
    check_reservation(replace(GOOD, prompt_token_ids=(1,) * (FACTS.max_context - 1)), FACTS)


@pytest.mark.parametrize(
    ("role", "requests", "tokens", "batch"), [("decode", 64, 512, 64), ("decode", 64, 32, 32), ("both", 64, 64, 32)]
)
def test_with_both_halves_open_prompts_keep_half_of_a_step(role: str, requests: int, tokens: int, batch: int) -> None:
    engine = EngineConfig.of(Path("m"), max_batch_requests=requests, max_step_tokens=tokens)
    assert decode_batch(Role(role), engine) == batch
