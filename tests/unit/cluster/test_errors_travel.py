"""An actor's error reaches its caller unchanged."""

import pickle

import pytest

from tandem.protocol.errors import InvalidArgument, ModelError, ResourceExhausted, TandemError


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("--device", "there is no GPU"),
        ModelError("no config"),
        ResourceExhausted("full", retry_after_s=2.0),
    ],
)
def test_errors_survive_pickling(error: TandemError) -> None:
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is type(error)
    assert (back.message, back.retry_after_s, str(back)) == (error.message, error.retry_after_s, str(error))
    assert getattr(back, "field", None) == getattr(error, "field", None)
