"""Service classes, tenants and prefix caches, through gRPC and HTTP of a router over fake workers."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc.aio
import openai
import pytest

from router.access.tenants import tenant_of, tenant_salt
from router.config import RouterConfig
from tandem.net.rpc import RETRY_AFTER
from tandem.protocol.cost_parameters import UNMEASURED
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tandem.protocol.generated.tandem.v1 import types_pb2
from tandem.protocol.messages import Role
from tandem.protocol.page_digests import page_digests, root_digest
from tandem.settings.model import ModelSettings
from tandem.settings.slo import BEST_EFFORT, DEFAULT_CLASSES, Overload, SloClass, parse_class, with_defaults
from tests.unit.router.conftest import Cluster
from tests.unit.router.fake_cluster import FakeWorker, channel_to, until
from tests.unit.router.test_generate import Client, ask, expected

HOPELESS = SloClass("hopeless", ttft_s=1e-3)
KIND = SloClass("kind", ttft_s=1e-3, overload=Overload.DEGRADE)
STRICT = DEFAULT_CLASSES[0]
PROMPT = list(range(5, 5 + 40))


@pytest.fixture
async def client(cluster: Cluster) -> Any:
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield Client(channel)


async def measured(cluster: Cluster, token_s: float = UNMEASURED.token_s) -> None:
    """The workers say that they know how long their steps take."""
    for worker in cluster.workers:
        worker.cost = replace(UNMEASURED, token_s=token_s, observed=1)
        worker.cache([])
    links = cluster.router._dispatcher.pool.links
    await until(lambda: all(link.state.cost.parameters.observed for link in links), "the router heard it")


class TestClasses:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"slo_classes": (*DEFAULT_CLASSES, HOPELESS, KIND)}

    async def test_both_listeners_take_configured_names(self, cluster: Cluster, client: Client) -> None:
        await measured(cluster)
        for name in ("", "best_effort", "strict", "kind"):
            _, ids, _ = await client.run(ask(4, slo_class=name))
            assert ids == expected(4)
        error = await client.error(ask(4, slo_class="gold"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "'gold' is not one of strict, balanced, quick, best_effort, hopeless, kind" in (error.details() or "")
        base = f"http://{cluster.endpoints.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as http:
            body = {"slo_class": "strict"}
            reply = await http.completions.create(model="fake", prompt="x", max_tokens=3, extra_body=body)
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 3
            with pytest.raises(openai.BadRequestError, match="slo_class"):
                await http.completions.create(model="fake", prompt="x", extra_body={"slo_class": "gold"})

    async def test_what_cannot_be_kept_is_said_at_once(self, cluster: Cluster, client: Client) -> None:
        _, ids, _ = await client.run(ask(4, slo_class="hopeless"))
        assert ids == expected(4), "as long as nothing was measured nothing is refused"
        await measured(cluster)
        error = await client.error(ask(4, slo_class="hopeless"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "class 'hopeless' promises it within 0.001 s" in (error.details() or "")
        base = f"http://{cluster.endpoints.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as http:
            with pytest.raises(openai.RateLimitError):
                await http.completions.create(model="fake", prompt="x", extra_body={"slo_class": "hopeless"})

    async def test_a_busy_cluster_says_when_to_come_back(self, cluster: Cluster, client: Client) -> None:
        await measured(cluster, token_s=0.02)
        cluster.prefill.switches.silent_prefill = True
        waiting = [asyncio.create_task(client.run(ask(4, prompt=[5] * 900, slo_class="best_effort")))]
        await until(lambda: len(cluster.prefill.prefills) == 1, "it is placed")
        error = await client.error(ask(4, slo_class="quick"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        hint = float(dict(error.trailing_metadata() or ())[RETRY_AFTER])
        assert 5 < hint < 19, "900 tokens take 18 s, and some of them are over"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        cluster.prefill.switches.silent_prefill = False


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"default_slo_class": "gold"}, "default_slo_class"),
        ({"slo_classes": (*DEFAULT_CLASSES, BEST_EFFORT)}, "slo_classes"),
        ({"max_deferral_s": 0.0}, "max_deferral_s"),
        ({"max_queued_per_tenant": 0}, "max_queued_per_tenant"),
    ],
)
def test_settings_that_cannot_be_are_named(tmp_path: Any, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{field}: "):
        RouterConfig("r", ModelSettings(tmp_path, ("m",)), "", **settings)


@pytest.mark.parametrize("wrong", [{"name": ""}, {"ttft_s": 0.0}, {"itl_s": -1.0}, {"itl_percent": 100.0}])
def test_classes_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"^slo_classes: "):
        SloClass(**{"name": "x", **wrong})


def test_classes_are_read_from_words() -> None:
    assert parse_class("chat:500:40") == SloClass("chat", ttft_s=0.5, itl_s=0.04)
    assert parse_class("chat:500:40:95:degrade") == SloClass(
        "chat", ttft_s=0.5, itl_s=0.04, itl_percent=95, overload=Overload.DEGRADE
    )
    assert parse_class("chat:500:40:95:200") == SloClass("chat", 0.5, 0.04, itl_percent=95, worst_gap_s=0.2)
    for wrong in (
        "chat",
        "chat:500",
        "chat:500:x",
        "chat:500:40:99:1:1",
        "chat:500:40:99:0",
        "chat:500:40:shed",
        ":500:40",
        "chat:0:40",
    ):
        with pytest.raises(InvalidArgument, match=r"^(--slo-class|slo_classes): "):
            parse_class(wrong)


def test_own_classes_stand_beside_or_instead_of_the_usual_ones() -> None:
    own = SloClass("chat", 0.5, 0.04), SloClass("balanced", 2.0, 0.1)
    by_name = {slo_class.name: slo_class for slo_class in with_defaults(own)}
    assert list(by_name) == ["strict", "balanced", "quick", "best_effort", "chat"]
    assert (by_name["chat"], by_name["balanced"]) == own
    with pytest.raises(InvalidArgument, match="two classes named 'chat'"):
        with_defaults([own[0], own[0]])


class TestTenants:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"api_keys": ("one", "two")}

    async def test_no_two_tenants_share_a_cache(self, cluster: Cluster) -> None:
        """Tenants are told apart by key, at either listener, and whatever salt they choose."""
        for key in ("one", "two"):
            async with channel_to(cluster.endpoints.grpc_address, key) as channel:
                for salt in ("", "x"):
                    await Client(channel).run(ask(2, cache_salt=salt))
            base = f"http://{cluster.endpoints.http_address}/v1"
            async with openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0) as http:
                await http.completions.create(model="fake", prompt=[5, 6], max_tokens=2, extra_body={"cache_salt": "x"})
        salts = [task.cache_salt for task in cluster.prefill.prefills]
        assert salts[2] == salts[1]
        assert salts[5] == salts[4]
        assert len({salts[0], salts[1], salts[3], salts[4]}) == 4
        assert not any("one" in salt or "two" in salt for salt in salts), "keys stay here"
        assert [reservation.cache_salt for reservation in cluster.decode.reservations] == salts

    async def test_a_tenant_cannot_end_another_tenants_request_or_take_its_name(self, cluster: Cluster) -> None:
        cluster.decode.switches.held_at = 2
        address = cluster.endpoints.grpc_address
        async with channel_to(address, "one") as one, channel_to(address, "two") as two:
            mine, others = Client(one), Client(two)
            request = ask(4)
            request.request_id = "1"
            running = [asyncio.create_task(client.run(request)) for client in (mine, others)]
            await until(lambda: len(cluster.decode.tasks) == 2, "both decode")
            assert (await others.stub.Abort(pb.AbortRequest(request_id="1"))).found
            _, _, complete = await running[1]
            assert complete.finish_reason == types_pb2.FINISH_REASON_ABORT
            assert not (await others.stub.Abort(pb.AbortRequest(request_id="1"))).found
            cluster.decode.go.set()
            _, ids, _ = await running[0]
            assert ids == expected(4)


def test_salts_of_tenants_never_meet() -> None:
    keys = ("a", "b")
    tenants = ["", *(tenant_of(key) for key in keys)]
    assert len(set(tenants)) == 3
    assert tenant_of(None) == ""
    wished = ["", "x", "/x", *tenants, *(f"{tenant}/x" for tenant in tenants)]
    made = [tenant_salt(tenant, salt) for tenant in tenants for salt in dict.fromkeys(wished)]
    assert len(set(made)) == len(made)
    assert tenant_salt("", "") == ""


def salted(prompt: list[int]) -> list[bytes]:
    return page_digests(prompt, 16, root_digest(""))


async def test_requests_go_where_their_beginning_is(cluster: Cluster, client: Client) -> None:
    others = [await FakeWorker(f"prefill-{n}", Role.PREFILL, token="secret").start() for n in (1, 2)]
    await cluster.members(cluster.prefill, *others, cluster.decode)
    others[1].cache(salted(PROMPT))
    index = cluster.router._dispatcher.pool.fleet.prefixes
    await until(lambda: len(index) == 2, "the router heard of both pages")
    for _ in range(3):
        await client.run(ask(2, prompt=PROMPT))
    assert [len(worker.prefills) for worker in (cluster.prefill, *others)] == [0, 0, 3]
    await client.run(ask(2, prompt=PROMPT, cache_salt="mine"))
    assert len(others[1].prefills) == 3, "under another salt nothing is held anywhere"


async def test_what_was_cached_before_the_router_came_is_listed(cluster: Cluster) -> None:
    old = FakeWorker("prefill-1", Role.PREFILL, token="secret")
    old.cache(salted(PROMPT))
    await old.start()
    await cluster.members(cluster.prefill, old, cluster.decode)
    index = cluster.router._dispatcher.pool.fleet.prefixes
    await until(lambda: len(index) == 2, "the list came")
    assert old.listed == 1


async def test_a_lost_batch_is_repaired_and_a_lost_worker_forgotten(cluster: Cluster) -> None:
    pool, worker = cluster.router._dispatcher.pool, cluster.prefill
    link = pool.link(worker.info.peer)
    await until(lambda: link._prefixes.in_step, "in step")
    worker.cache(salted(PROMPT), reported=False)
    assert len(pool.fleet.prefixes) == 0
    worker.cache(salted([9] * 16))
    await until(lambda: len(pool.fleet.prefixes) == 3, "the gap was seen, and the list has all")
    assert worker.listed == 2
    await worker.drop_streams()
    await until(lambda: worker.listed == 3 and link._prefixes.in_step, "a new stream begins with a list")
    assert len(pool.fleet.prefixes) == 3
    heir = await FakeWorker(worker.worker_id, Role.PREFILL, incarnation=2, token="secret").start()
    await cluster.members(heir, cluster.decode)
    await until(lambda: len(pool.fleet.prefixes) == 0, "what the dead one held is gone")


async def test_what_was_expected_is_compared_with_what_came(cluster: Cluster, client: Client) -> None:
    prediction_quality = cluster.router._dispatcher.prediction_quality
    await client.run(ask(8, prompt=PROMPT))
    record = prediction_quality.last
    assert record is not None
    assert (record.prefill_worker, record.decode_worker, record.slo_class) == ("prefill-0", "decode-0", "best_effort")
    assert record.prediction.computed_tokens == 40
    assert record.prediction.ttft_s == pytest.approx(0.06, rel=0.01), "a base of 20 ms and 1 ms a token, as guessed"
    assert record.ttft_s > 0
    assert record.itl_s is not None
    assert (
        prediction_quality.prediction_error_s == record.prediction_error_s == record.ttft_s - record.prediction.ttft_s
    )
    assert record.regret_s == 0, "there was nobody else"
    cluster.prefill.switches.fail_transfers = 1
    await client.run(ask(8, prompt=PROMPT))
    assert prediction_quality.recorded == 1, "an attempt that failed says nothing of placement"
    await client.run(ask(1, prompt=PROMPT))
    assert prediction_quality.recorded == 2
    assert prediction_quality.last is not None
    assert prediction_quality.last.itl_s is None


async def test_transfers_teach_the_router_how_long_a_page_takes(cluster: Cluster, client: Client) -> None:
    receiver = cluster.router._dispatcher.pool.link(cluster.decode.info.peer).state
    assert receiver.page_transfer_s == 0.0
    await client.run(ask(8, prompt=PROMPT))
    assert receiver.page_transfer_s > 0.0


async def test_a_worker_that_gives_no_list_serves_all_the_same(cluster: Cluster) -> None:
    plain = await FakeWorker("decode-1", Role.DECODE, token="secret").start()

    async def unknown(_request: Any, _context: Any) -> Any:
        raise InvalidArgument("method", "is not known here")

    plain.ListPrefixes = unknown  # type: ignore[method-assign]
    await cluster.members(cluster.prefill, plain)
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        _, ids, _ = await Client(channel).run(ask(4))
        assert ids == expected(4)
