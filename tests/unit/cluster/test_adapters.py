"""The controller's list of adapters: every worker has them before requests may name them, or none has."""

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import replace

import pytest

import tandem.cluster.operations.adapters
from tandem.cluster.operations.adapters import Adapters
from tandem.cluster.supervision.registry import Registry
from tandem.protocol.errors import (
    FailedPrecondition,
    InvalidArgument,
    ModelError,
    NotFound,
    ResourceExhausted,
    TandemError,
)
from tandem.protocol.messages import AdapterFacts, PeerRef, Role, WorkerInfo

from .crew import FACTS, until

SQL = AdapterFacts("sql", "hash of /sql", "/sql")


class Workers:
    """Workers that load adapters, whose hash is that of their folder, as fast as a test says."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.infos: dict[str, WorkerInfo] = {}
        self.failures: dict[str, TandemError] = {}
        """What loading fails with, by worker."""
        self.hashes: dict[str, str] = {}
        """The hash of what a worker finds in any folder, where it is another one."""
        self.loads: list[tuple[str, str]] = []
        self.used: dict[str, Collection[str]] = {}
        """The hashes of the adapters that requests use, by worker."""
        self.spared: list[tuple[str, list[str]]] = []
        """The hashes of the adapters whose slots a load may not take, with its worker."""
        self.held = asyncio.Event()
        """Unset: loading does not end."""
        self.held.set()
        self.deaf: set[str] = set()
        """Workers that do not unload."""

    def start(self, name: str, incarnation: int = 1, *adapters: AdapterFacts) -> None:
        facts = replace(FACTS, adapters=adapters)
        self._say(
            WorkerInfo(PeerRef(name, incarnation), Role.BOTH, "a:1", facts, 8, 4, 8, 16, "cpu", "fake"),
        )

    def die(self, name: str) -> None:
        self.registry.unregister(self.infos.pop(name).peer)

    def listed(self) -> list[str] | None:
        adapters = self.registry.membership().adapters
        return None if adapters is None else [adapter.name for adapter in adapters]

    def loaded(self, name: str) -> list[str]:
        return [adapter.name for adapter in self.infos[name].model.adapters]

    def not_ready(self, name: str) -> str:
        return next(worker.not_ready for worker in self.registry.membership().workers if worker.peer.worker_id == name)

    async def adapters_in_use(self, info: WorkerInfo) -> Collection[str]:
        return self.used.get(info.peer.worker_id, ())

    async def load_adapter(self, info: WorkerInfo, adapter: AdapterFacts, in_use: Collection[str]) -> AdapterFacts:
        name = info.peer.worker_id
        self.loads.append((name, adapter.name))
        self.spared.append((name, sorted(in_use)))
        await self.held.wait()
        if name in self.failures:
            raise self.failures[name]
        loaded = replace(adapter, identity=self.hashes.get(name, f"hash of {adapter.path}"))
        if adapter.identity not in {"", loaded.identity}:
            raise FailedPrecondition("another hash")
        now = self.infos[name]
        others = tuple(other for other in now.model.adapters if other.name != loaded.name)
        self._say(replace(now, model=replace(now.model, adapters=(*others, loaded))))
        return loaded

    async def unload_adapter(self, info: WorkerInfo, name: str) -> None:
        worker = info.peer.worker_id
        if worker in self.deaf:
            raise FailedPrecondition(f"worker {worker}: it does not hear")
        now = self.infos[worker]
        left = tuple(adapter for adapter in now.model.adapters if adapter.name != name)
        self._say(replace(now, model=replace(now.model, adapters=left)))

    def _say(self, info: WorkerInfo) -> None:
        self.infos[info.peer.worker_id] = info
        self.registry.register(info)


@pytest.fixture
async def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr(tandem.cluster.operations.adapters, "RETRY_S", 0.01)
    made = Workers()
    for name in ("a", "b"):
        made.start(name)
    return made


@pytest.fixture
async def adapters(workers: Workers) -> AsyncIterator[Adapters]:
    made = Adapters(workers.registry, workers, allowed=True, model_names=("base",))
    running = asyncio.ensure_future(made.run())
    await until(lambda: workers.listed() == [])
    yield made
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_requests_may_name_it_once_all_workers_have_it(workers: Workers, adapters: Adapters) -> None:
    workers.held.clear()
    loading = asyncio.ensure_future(adapters.load("sql", "/sql"))
    await until(lambda: len(workers.loads) == 2)
    assert workers.listed() == []
    workers.start("late")  # a worker that comes meanwhile is waited for, too
    workers.held.set()
    assert await loading == SQL
    assert workers.listed() == ["sql"]
    assert [workers.loaded(name) for name in ("a", "b", "late")] == [["sql"]] * 3
    await adapters.unload("sql")
    assert workers.listed() == []
    assert [workers.loaded(name) for name in ("a", "b", "late")] == [[]] * 3


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ModelError("worker b: /sql is no adapter"), InvalidArgument, "lora_path: worker b: /sql is no adapter"),
        (InvalidArgument("max_lora_rank", "is 16"), InvalidArgument, "lora_path: worker b: max_lora_rank: is 16"),
        (ResourceExhausted("worker b: all 2 slots"), ResourceExhausted, "worker b: all 2 slots"),
    ],
)
async def test_if_one_worker_fails_none_keeps_it(
    workers: Workers, adapters: Adapters, error: TandemError, kind: type[TandemError], words: str
) -> None:
    workers.failures["b"] = error
    with pytest.raises(kind, match=words):
        await adapters.load("sql", "/sql")
    assert workers.listed() == workers.loaded("a") == workers.loaded("b") == []
    workers.failures.clear()
    assert await adapters.load("sql", "/sql") == SQL


async def test_no_worker_takes_the_slot_of_an_adapter_that_requests_use_on_another(
    workers: Workers, adapters: Adapters
) -> None:
    """Also one that starts late: a prompt may be sent to it after the reservation on another."""
    workers.used = {"a": ["x", "y"], "b": ["y", "z"]}
    await adapters.load("sql", "/sql")
    workers.start("late")
    await until(lambda: not workers.not_ready("late"))
    assert workers.spared == [(name, ["x", "y", "z"]) for name in ("a", "b", "late")]


async def test_workers_with_other_files_are_refused(workers: Workers, adapters: Adapters) -> None:
    workers.hashes["b"] = "other"
    with pytest.raises(InvalidArgument, match="other files on another worker's host"):
        await adapters.load("sql", "/sql")
    assert workers.loaded("a") == workers.loaded("b") == []


async def test_two_routers_that_load_the_same_name_at_once(workers: Workers, adapters: Adapters) -> None:
    results = await asyncio.gather(adapters.load("sql", "/sql"), adapters.load("sql", "/other"), return_exceptions=True)
    assert results[0] == SQL
    assert isinstance(results[1], InvalidArgument)
    assert "loaded already; unload it first" in results[1].message
    assert workers.listed() == ["sql"]
    assert all(info.model.adapters == (SQL,) for info in workers.infos.values())


async def test_a_worker_that_restarts_takes_no_requests_until_it_has_them(workers: Workers, adapters: Adapters) -> None:
    await adapters.load("sql", "/sql")
    workers.die("b")
    workers.held.clear()
    workers.start("b", 2)
    assert workers.not_ready("b") == "adapter 'sql' is not loaded"
    assert not workers.not_ready("a")
    assert workers.listed() == ["sql"]
    workers.held.set()
    await until(lambda: not workers.not_ready("b"))
    assert workers.loaded("b") == ["sql"]


async def test_what_a_restarted_worker_cannot_load_is_named_and_tried_again(
    workers: Workers, adapters: Adapters
) -> None:
    await adapters.load("sql", "/sql")
    workers.die("b")
    workers.failures["b"] = ModelError("/sql is no adapter")
    workers.start("b", 2)
    await until(lambda: "(/sql is no adapter); unload it, or repair it" in workers.not_ready("b"))
    workers.failures.clear()
    await until(lambda: not workers.not_ready("b"))
    workers.die("a")
    workers.failures["a"] = ModelError("/sql is no adapter")
    workers.start("a", 2)
    await until(lambda: "no adapter" in workers.not_ready("a"))
    await adapters.unload("sql")
    assert not workers.not_ready("a")


async def test_a_worker_that_does_not_unload_is_asked_again(workers: Workers, adapters: Adapters) -> None:
    await adapters.load("sql", "/sql")
    workers.deaf.add("b")
    await adapters.unload("sql")
    assert (workers.listed(), workers.loaded("b")) == ([], ["sql"])
    workers.deaf.clear()
    await until(lambda: not workers.loaded("b"))


async def test_a_controller_that_takes_over_knows_what_live_workers_have() -> None:
    """Also where the one before died in the middle of a change: all workers become alike."""
    workers, poems = Workers(), AdapterFacts("poems", "hash of /poems", "/poems")
    workers.start("a", 1, SQL, poems)
    workers.start("b", 1, SQL)
    first = [AdapterFacts("sql", "", "/sql"), AdapterFacts("new", "", "/new")]
    adapters = Adapters(workers.registry, workers, allowed=True, first=first)
    adapters.inherit()
    running = asyncio.ensure_future(adapters.run())
    await until(lambda: workers.listed() == ["sql", "new", "poems"])
    await until(lambda: not workers.not_ready("a") and not workers.not_ready("b"))
    assert ("a", "sql") not in workers.loads
    assert set(workers.loaded("a")) == set(workers.loaded("b")) == {"sql", "new", "poems"}
    running.cancel()


async def test_a_controller_that_followed_takes_over_the_list_without_what_was_unloaded() -> None:
    """Also one that led before and has a list of its own."""
    workers, poems = Workers(), AdapterFacts("poems", "hash of /poems", "/poems")
    workers.start("a", 1, SQL, poems)
    adapters = Adapters(workers.registry, workers, allowed=True, first=[AdapterFacts("gone", "", "/gone")])
    adapters.inherit()
    workers.registry.set_adapters((SQL,))  # as the leader that was followed had it
    adapters.inherit()
    running = asyncio.ensure_future(adapters.run())
    await until(lambda: workers.loaded("a") == ["sql"])
    assert workers.listed() == ["sql"]
    assert ("a", "gone") not in workers.loads
    running.cancel()


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        ("", "/sql", "lora_name"),
        ("a\nb", "/sql", "lora_name"),
        ("n" * 257, "/sql", "lora_name"),
        ("base", "/sql", "the model's own name"),
        ("sql", "adapters/sql", "no absolute path"),
        ("sql", "/a\0b", "no absolute path"),
    ],
)
async def test_bad_arguments(workers: Workers, adapters: Adapters, name: str, path: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        await adapters.load(name, path)
    assert not workers.loads


async def test_an_unknown_adapter_cannot_be_unloaded(adapters: Adapters) -> None:
    await adapters.load("sql", "/sql")
    with pytest.raises(NotFound, match="'poems' is not loaded; loaded are: 'sql'"):
        await adapters.unload("poems")


async def test_a_cluster_that_does_not_allow_it(workers: Workers) -> None:
    adapters = Adapters(workers.registry, workers, allowed=False)
    await adapters.run()
    for change in (adapters.load("sql", "/sql"), adapters.unload("sql")):
        with pytest.raises(FailedPrecondition, match="--allow-runtime-lora-updating"):
            await change
    assert workers.listed() is None
