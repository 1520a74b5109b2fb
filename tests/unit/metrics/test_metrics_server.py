"""The HTTP listener for scrapers: the accepted keys, and Tandem's own scraper on its replies."""

import socket

import pytest

from tandem.metrics import families as f
from tandem.metrics.exposition import Exposition
from tandem.metrics.metrics_server import METRICS_PATH, MetricsServer, fetch, metrics_page
from tandem.metrics.registry import Registry
from tandem.net.security.credentials import metrics_key_of, reading_keys, shows_key
from tandem.protocol.errors import FailedPrecondition, Unavailable


def pages() -> dict[str, object]:
    registry = Registry({"worker": "w"})
    registry.counter(f.PREEMPTIONS).add(3)
    return {METRICS_PATH: metrics_page(Exposition(registry))}


async def test_who_shows_the_key_reads() -> None:
    listener = MetricsServer(pages(), frozenset({"right", "token"}))
    address = await listener.open("127.0.0.1")
    try:
        for key in ("right", "token"):
            assert 'tandem_num_preemptions_total{worker="w"} 3.0' in await fetch(
                address, METRICS_PATH, key, timeout_s=60.0
            )
        for key in ("", "wrong"):
            with pytest.raises(Unavailable, match="401 send 'Authorization: Bearer <metrics key>'"):
                await fetch(address, METRICS_PATH, key, timeout_s=60.0)
        with pytest.raises(Unavailable, match="404 GET one of /metrics"):
            await fetch(address, "/else", "right", timeout_s=60.0)
        with pytest.raises(FailedPrecondition, match="metrics_port"):
            await MetricsServer(pages(), frozenset()).open("127.0.0.1", int(address.rpartition(":")[2]))
    finally:
        await listener.close()
    await listener.close()
    with pytest.raises(Unavailable, match="no metrics from"):
        await fetch(address, METRICS_PATH, "right", timeout_s=60.0)


async def test_without_keys_no_process_is_scraped() -> None:
    listener = MetricsServer(pages(), frozenset())
    address = await listener.open("::1")
    try:
        assert await fetch(address, METRICS_PATH, timeout_s=60.0)
    finally:
        await listener.close()


async def test_a_silent_process_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        with pytest.raises(Unavailable, match="TimeoutError"):
            await fetch(address, METRICS_PATH, timeout_s=0.05)


OF_TOKEN = metrics_key_of("token")


@pytest.mark.parametrize(
    ("metrics_key", "api_keys", "token", "loopback", "opens"),
    [
        ("", (), "token", True, None),
        ("", (), "token", False, {OF_TOKEN}),
        ("", ("tenant",), "token", True, {OF_TOKEN}),
        ("key", (), "token", True, {"key", OF_TOKEN}),
        ("key", ("tenant",), "", False, {"key"}),
        ("", ("tenant",), "", True, set()),
    ],
)
def test_who_may_read(
    metrics_key: str, api_keys: tuple[str, ...], token: str, loopback: bool, opens: set[str] | None
) -> None:
    """Neither an API key nor the cluster token opens metrics; None = no key is required."""
    keys = reading_keys(metrics_key, token, guarded=bool(api_keys), loopback=loopback)
    assert (not keys) == (opens is None)
    for key in ("key", OF_TOKEN, "token", "tenant", ""):
        assert shows_key([("authorization", f"Bearer {key}")], keys) == (key in (opens or ()))
