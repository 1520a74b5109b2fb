"""A simulated attempt that fails is retried, or ends its request, by the rules of the real router."""

import pytest

from tandem.capacity.simulation.request import Outcome
from tandem.protocol.errors import Internal, RoleClosed, TandemError, Unavailable
from tandem.protocol.messages import ErrorDetail, FinishReason, RequestEvent, Role, StepOutput
from tandem.protocol.mode import Mode
from tests.unit.capacity.simulation.stages import cluster, request


def fail(error: TandemError, times: int) -> Outcome:
    """Returns the outcome of a request whose first `times` attempts fail with `error` while they decode."""
    stage = cluster(Mode.COLOCATED, [Role.BOTH])
    (worker,) = stage.workers.values()
    detail = ErrorDetail(error.code, error.message)

    def fail_attempt() -> None:
        events = [
            RequestEvent(running.ref, finish_reason=FinishReason.ERROR, error=detail)
            for running in stage.router.requests
        ]
        stage.router.on_step_output(worker, StepOutput(len(worker.log), tuple(events), worker.load()))

    for number in range(times):
        stage.clock.at(10.1 + 0.2 * number, fail_attempt)
    (outcome,) = stage.run([request(10.0, 100, 400)])
    return outcome


def test_an_attempt_is_retried_after_an_error_of_its_worker() -> None:
    outcome = fail(Unavailable("the worker went away"), 1)
    assert (outcome.error, outcome.attempts) == ("", 2)
    assert len(outcome.firsts_s) == 2


def test_a_request_fails_at_once_if_a_retry_cannot_help() -> None:
    outcome = fail(Internal("the worker has a defect"), 1)
    assert (outcome.error, outcome.attempts) == (Internal.code, 1)


@pytest.mark.parametrize(("error", "end"), [(Unavailable("gone"), Unavailable.code), (RoleClosed("it drains"), "")])
def test_only_attempts_that_a_changing_role_has_not_ended_count_as_failures(error: TandemError, end: str) -> None:
    assert fail(error, 4).error == end
