"""The benchmark of forwarding tokens: its worker, readers and figures; no timing."""

import argparse
import multiprocessing as mp
from pathlib import Path
from typing import Any

import pytest

from benchmarks import streaming
from benchmarks.load.token_source import TOKEN, TokenSource
from benchmarks.streaming import _figures, _read, _shares, _turn
from router.config import RouterConfig
from router.server import RouterServer
from tests.unit.router import conftest
from tests.unit.router.fake_cluster import until

model = conftest.model


class Pipe:
    """Collects what a reader sends to the benchmark."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, what: Any) -> None:
        self.sent.append(what)


async def test_every_token_of_every_answer_is_read(model: Path) -> None:
    source = TokenSource(0.001)
    config = RouterConfig(
        "router-0", model, "tokens", await source.start(), token=TOKEN, grpc_port=0, http_port=0, chunks_per_s=1e9
    )
    router = RouterServer(config)
    listeners = await router.start()
    await until(lambda: router.ready, "the source is found")
    pipe = Pipe()
    await _read(pipe, listeners.grpc_address, 0, 5, 40)  # type: ignore[arg-type]
    ((tokens, chunks, cpu_s),) = pipe.sent
    assert tokens == 5 * 40
    assert 5 * 2 <= chunks <= tokens
    assert cpu_s > 0
    assert not source._running
    await router.stop(0.0)
    source._stepping.cancel()
    await source._server.stop(None)


@pytest.mark.parametrize(
    ("answers", "clients", "shares"), [(128, 2, [64, 64]), (128, 3, [43, 43, 42]), (2, 3, [1, 1]), (1, 1, [1])]
)
def test_readers_share_all_answers(answers: int, clients: int, shares: list[int]) -> None:
    assert _shares(answers, clients) == shares


def test_figures_are_medians_and_their_ratio() -> None:
    own = [{"router_us": each, "fronts_us": 0.0} for each in (80.0, 1000.0, 70.0)]
    fronts = [{"router_us": each, "fronts_us": 44.0} for each in (40.0, 20.0, 41.0)]
    figures = _figures(own, fronts)
    assert figures["own_listeners"] == {"router_us": 80.0, "fronts_us": 0.0}
    assert figures["front_processes"] == {"router_us": 40.0, "fronts_us": 44.0}
    assert figures["router_ratio"] == 0.5


def _dies(*_: object) -> None:
    raise SystemExit(1)


def test_a_router_that_dies_ends_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the benchmark waited forever, since its own process held the pipe's other end open."""
    monkeypatch.setattr(streaming, "run_router", _dies)
    with pytest.raises(EOFError):
        _turn(mp.get_context("spawn"), argparse.Namespace(answers=1, clients=1, tokens=1), "", Path(), 0)
