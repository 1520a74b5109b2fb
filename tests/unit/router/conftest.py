"""A small model folder, and a router over fake workers."""

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from router.api.listeners import RouterEndpoints
from router.config import RouterConfig
from router.server import RouterServer
from router.text.tokenizer import Tokenizer
from tandem.protocol.generated.tandem.v1 import inference_pb2_grpc
from tandem.protocol.messages import PeerRef, Role, WorkerInfo
from tandem.protocol.mode import Mode
from tandem.settings.model import ModelSettings
from tandem.settings.secrets import Secrets
from tests.certificates import Authority
from tests.small_tokenizer import save_tokenizer
from tests.unit.router.fake_cluster import VOCAB_SIZE, FakeController, FakeWorker, channel_to, until

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "The quick brown fox jumps over the lazy dog; 你好世界, naïve café 😀. " * 3


@pytest.fixture(scope="session", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each HTTP client reads the authorities that it trusts, also for plain HTTP: one, not those of the public web."""
    file = tmp_path_factory.mktemp("authority") / "authority.crt"
    file.write_bytes(Authority("unused").pem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer of VOCAB_SIZE ids, the first three special, and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    texts = [f"{TEXT} {chr(97 + i)}{chr(98 + i)}{chr(99 + i)}" * 4 for i in range(20)]
    save_tokenizer(folder, VOCAB_SIZE, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), texts)
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


WITHOUT_RECOVERY = {"recovery_timeout_s": 0.0}
"""Settings with which requests fail at once if no live worker has a role."""


@dataclass
class Cluster:
    """A router over fake workers. `restart` replaces workers; tests may change its fields."""

    controller: FakeController
    workers: list[FakeWorker]
    router: RouterServer
    config: RouterConfig
    endpoints: RouterEndpoints
    extra: list[FakeWorker] = field(default_factory=list)

    @property
    def prefill(self) -> FakeWorker:
        return next(w for w in self.workers if w.role.prefills)

    @property
    def decode(self) -> FakeWorker:
        return next(w for w in self.workers if w.role.decodes)

    async def members(self, *workers: FakeWorker) -> None:
        """Registers exactly these workers, with their current facts, and waits until the router knows them."""
        self.workers = list(workers)
        self.extra.extend(workers)
        await self.controller.set(*workers)
        infos = [worker.info for worker in workers]
        views = self.router._dispatcher.pool.views
        await until(lambda: _open([view.info for view in views()]) == _open(infos), "all are live")

    async def settled(self) -> None:
        """Waits until neither the router nor any live worker has a request."""
        dispatcher = self.router._dispatcher
        await until(lambda: not dispatcher._live and not dispatcher._calls, "the router forgot every request")
        await until(lambda: all(w.idle for w in self.workers), "the workers forgot every request")
        for link in dispatcher.pool.links:
            assert not link.request_ids
            assert len(link.leases) == 0
            assert not link.state.gap_targets
        assert not dispatcher._live._by_client_id
        assert dispatcher.waiting == 0


def _open(infos: Iterable[WorkerInfo]) -> dict[PeerRef, WorkerInfo]:
    """Returns the workers that accept new requests, without those that leave when their requests are done."""
    return {info.peer: info for info in infos if info.open is not None}


@pytest.fixture
def settings() -> dict[str, Any]:
    """Fields of RouterConfig that a test module overrides."""
    return {}


@pytest.fixture
async def cluster(model: Path, settings: dict[str, Any]) -> AsyncIterator[Cluster]:
    """One prefill worker, one decode worker and a ready router; asserts at the end that nothing leaked."""
    controller = await FakeController("secret").start()
    workers = [
        await FakeWorker("prefill-0", Role.PREFILL, token="secret").start(),
        await FakeWorker("decode-0", Role.DECODE, token="secret").start(),
    ]
    config = RouterConfig(
        "router-0", ModelSettings(model, ("fake",)), controller.address, Secrets("secret"), grpc_port=0, http_port=0
    ).with_fields(**{"mode": Mode.ADAPTIVE, "default_max_tokens": 32, **settings})
    router = RouterServer(config)
    cluster = Cluster(controller, workers, router, config, await router.start(), list(workers))
    await cluster.members(*workers)
    yield cluster
    await cluster.settled()
    await router.stop(1.0)
    for worker in cluster.extra:
        await worker.kill()
    await controller.stop()


@pytest.fixture
async def stub(cluster: Cluster) -> AsyncIterator[inference_pb2_grpc.InferenceStub]:
    """A gRPC stub of the cluster's router."""
    async with channel_to(cluster.endpoints.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)
