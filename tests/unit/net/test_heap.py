"""After the start, the garbage collector scans only objects that were created since."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from router import server as router_server
from router.config import RouterConfig
from tandem.cluster.ray_processes import router_actor
from tandem.logging.logs import LogConfig
from tandem.settings.model import ModelSettings
from tandem.settings.secrets import Secrets
from tandem.worker import actor as worker_actor

_IN_A_PROCESS = """
import gc, weakref
from tandem.net.heap import freeze_gc

class Node:
    pass

def circle():
    node = Node()
    node.me = node
    return weakref.ref(node)

kept, before = [Node() for _ in range(1000)], circle()
freeze_gc()
assert before() is None, "what was garbage by then is gone"
assert gc.isenabled()
assert gc.get_freeze_count() >= 1000 and len(gc.get_objects()) < 1000, "nobody looks at the others again"
counted = gc.get_stats()[0]["collections"]
some = [Node() for _ in range(5000)]
assert gc.get_stats()[0]["collections"] == counted, "a few thousand objects in use cause no collection"
after = circle()
more = [Node() for _ in range(10_000)]
assert after() is None, "garbage is found by itself"
"""


_IMPORTS = """
import gc
from tandem.net.heap import keep_imports

enabled = []
try:
    with keep_imports():
        kept = [[] for _ in range(1000)]
        enabled.append(gc.isenabled())
        raise ImportError
except ImportError:
    enabled.append(gc.isenabled())
assert enabled == [False, True]
assert gc.get_freeze_count() >= 1000 and len(gc.get_objects()) < 1000
"""


def test_imports_are_not_collected_and_stay_excluded() -> None:
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True, timeout=60)


def test_what_is_there_stays_and_what_comes_is_looked_at() -> None:
    subprocess.run([sys.executable, "-c", _IN_A_PROCESS], check=True, timeout=60)


async def test_a_router_and_a_worker_settle_when_they_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Server:
        def __init__(self, _config: object) -> None: ...

        async def prepare(self) -> None:
            done.append("prepared")

        async def start(self) -> str:
            done.append("router")
            return "listeners"

    monkeypatch.setattr(router_server, "RouterServer", Server)
    for module in (router_actor, worker_actor):
        monkeypatch.setattr(module, "freeze_gc", lambda: done.append("settled"))
    monkeypatch.setattr(router_actor, "begin_log", lambda *_: None)
    config = RouterConfig("router-1", ModelSettings(Path("m"), ("m",)), "127.0.0.1:1", Secrets("t"))
    router = router_actor.RouterActor(config, 1, LogConfig())
    worker = worker_actor.WorkerActor.__new__(worker_actor.WorkerActor)
    worker._process = SimpleNamespace(start=lambda _note: done.append("worker"), metrics_address="")  # type: ignore[assignment]
    await router.prepare()
    assert done == ["prepared", "settled"], "a standby is no slower than others once it is used"
    assert await router.start() == "listeners"
    assert await router.start() == "listeners"
    await worker.start()
    assert done == ["prepared", "settled", "router", "settled", "worker", "settled"]
