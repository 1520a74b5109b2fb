"""The controller's calls reach only the workers that they are for."""

import pytest

from tandem.cluster.supervision.worker_calls import WorkerCalls
from tandem.protocol.errors import Unavailable
from tandem.protocol.messages import Assignment, ModelFacts, PeerRef, Role, WorkerInfo
from tests.stranger import Stranger

TOKEN = "of-the-cluster"


async def test_a_process_at_a_departed_workers_port_does_not_receive_the_token() -> None:
    stranger = await Stranger().start()
    facts = ModelFacts("m", 10, 10, (), "float32")
    info = WorkerInfo(
        PeerRef("decode-0", 1),
        Role.DECODE,
        stranger.address,
        facts,
        1,
        1,
        1,
        1,
        "cpu",
        "fake",
        assignment=Assignment(Role.DECODE),
    )
    for call in (
        WorkerCalls(TOKEN).set_assignment(info, Assignment(Role.BOTH), 0.1),
        WorkerCalls(TOKEN).drain(info, 0.1),
    ):
        with pytest.raises(Unavailable, match="worker decode-0: the TLS handshake failed"):
            await call
    stranger.assert_learned_nothing(TOKEN)
    await stranger.stop()
