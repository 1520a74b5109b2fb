"""A router that reconnects to former addresses of workers and controllers reveals nothing to a new listener there."""

import pytest

from tests.stranger import Stranger
from tests.unit.router.conftest import WITHOUT_RECOVERY, Cluster
from tests.unit.router.fake_cluster import until


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("settings", [WITHOUT_RECOVERY])
async def test_a_stranger_at_a_dead_workers_port_does_not_receive_the_token(cluster: Cluster) -> None:
    dead = cluster.decode
    await dead.kill()
    stranger = await Stranger().start(_port(dead.address))
    await until(lambda: stranger.connections >= 2 or stranger.headers, "the router came back twice")
    stranger.assert_learned_nothing("secret")
    assert not cluster.router.ready
    await stranger.stop()


async def test_a_stranger_at_the_controllers_port_does_not_receive_the_token(cluster: Cluster) -> None:
    await cluster.controller.stop()
    stranger = await Stranger().start(_port(cluster.controller.address))
    await until(lambda: stranger.connections >= 2 or stranger.headers, "the router came back twice")
    stranger.assert_learned_nothing("secret")
    await stranger.stop()
