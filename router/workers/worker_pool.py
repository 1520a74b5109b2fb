"""The workers of the cluster as the controller lists them, with one link to each.

The router watches the controller's membership stream. Without a controller it keeps the last membership and continues
to serve.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc.aio

from router.config import RouterConfig
from router.placement.fleet import Fleet
from router.placement.worker_state import WorkerState
from router.workers.kv_events import KvEventLog, KvEventPublisher
from router.workers.worker_link import LinkObserver, WorkerLink
from tandem.logging.recurring import RECURRING
from tandem.net.rpc import is_refused_peer, open_channel
from tandem.protocol import conversion
from tandem.protocol.ending import answer_tokens
from tandem.protocol.generated.tandem.v1 import cluster_pb2, cluster_pb2_grpc
from tandem.protocol.messages import AdapterFacts, ExpectedWorker, Membership, ModelFacts, PeerRef, Role, WorkerInfo
from tandem.protocol.mode import Mode

log = logging.getLogger(__name__)

_RETRY_S = (0.1, 2.0)
"""Minimum and maximum pause before the router reconnects to the controller, in seconds."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the workers have loaded, and the sizes of the largest requests that they can hold.

    An immutable value.
    """

    facts: ModelFacts
    prefill_tokens_max: int
    """Number of tokens whose KV fits into the largest prefill worker."""
    decode_tokens_max: int
    """Number of tokens whose KV the largest decode worker can hold for answers."""
    decode_tokens_min: int
    """Number of tokens whose KV every decode worker can hold for answers."""
    page_tokens: int = 0
    """Tokens per KV page; 0 if the workers' page sizes differ: then page digests are not comparable."""


class PoolObserver(LinkObserver, Protocol):
    """The observer of the workers and of the cluster's mode, implemented by the dispatcher."""

    def on_mode(self, mode: str) -> None:
        """Called when the placement mode changes to `mode`, the value of a `Mode`."""


class WorkerPool:
    """Watches the cluster's membership, and opens and closes the links to the workers.

    The dispatcher owns it; all calls are on the event loop. Links of workers that left the cluster are kept until their
    last request has ended.
    """

    def __init__(self, config: RouterConfig, observer: PoolObserver) -> None:
        self._config = config
        self._observer = observer
        self.fleet = Fleet()
        """The state of the workers for placement."""
        self._kv_events: KvEventLog | None = None
        self._publisher: KvEventPublisher | None = None
        if config.kv_events_endpoint:
            self._kv_events = KvEventLog(self.fleet.prefixes, self._adapter_name)
            self._publisher = KvEventPublisher(config, self._kv_events)
        self._links: dict[PeerRef, WorkerLink] = {}
        self._model: ServedModel | None = None
        self.mode = config.mode.value
        """The placement mode set by the controller, the value of a `Mode`."""
        self.adapters: tuple[AdapterFacts, ...] = ()
        """The adapters that the controller last listed; () before that, while those of the workers' start are used."""
        self._expected: tuple[ExpectedWorker, ...] = ()
        self._channel = open_channel(config.controller_address, config.secrets.token)
        self.controller: Any = cluster_pb2_grpc.ClusterStub(self._channel)
        """The stub of the controller's gRPC service."""
        self._followed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._watch = asyncio.create_task(self._watch_forever(), name="router-watch")

    @property
    def links(self) -> list[WorkerLink]:
        """All links, including those of workers that left the cluster."""
        return list(self._links.values())

    @property
    def model(self) -> ServedModel | None:
        """The served model; None until a worker of each role has registered. It does not become None again."""
        return self._model

    @property
    def ready(self) -> bool:
        """True if a request could be served now: the model is known, and compatible workers of both roles are ready."""
        return self._serve([link for link in self._live() if not link.info.not_ready])

    @property
    def staffed(self) -> bool:
        """True if compatible workers of both roles are live, whether or not they are ready."""
        return self._serve(self._live())

    @property
    def coming(self) -> dict[str, Role]:
        """The roles of workers that do not serve now but are expected to, by worker id.

        Some are being started. The others are members of the cluster that are not connected, do not respond or are not
        ready; if the first two do not change, their supervisors replace them.
        """
        absent = {link.info.peer.worker_id: link.info.role for link in self._links.values() if link.may_return}
        return absent | {worker.worker_id: worker.role for worker in self._expected}

    @property
    def recovering(self) -> bool:
        """True if no request can be served now, but requests can be once the workers in `coming` are ready."""
        if self._model is None or self.ready:
            return False
        serving = [link.info.role for link in self._live() if not link.info.not_ready]
        roles, coming = [*serving, *self.coming.values()], self.coming
        return bool(coming) and any(role.prefills for role in roles) and any(role.decodes for role in roles)

    @property
    def misfit(self) -> str:
        """The reason why no live prefill worker is compatible with a live decode worker.

        It is "" if there is a compatible pair, or if a role has no live worker.
        """
        live = self._live()
        if not _has_both(live) or self._fit(live):
            return ""
        prefills, decodes = ([link.info.peer for link in links] for links in _by_role(live))
        return f"no prefill worker fits a decode worker; {self.fleet.incompatible.why(prefills, decodes)}"

    @property
    def not_ready(self) -> tuple[str, ...]:
        """The reasons why live workers do not accept new requests at present."""
        return tuple(f"{link.name} is not ready: {why}" for link in self._live() if (why := link.info.not_ready))

    def views(self) -> list[WorkerState]:
        """Return the placement states of the live workers."""
        return list(self.fleet.live)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` is true; it is checked after each membership message."""
        while not condition():
            await self._followed.wait()

    def link(self, peer: PeerRef) -> WorkerLink:
        """Return the link to `peer`; placement has just chosen this worker, so its link must be open."""
        return self._links[peer]

    def sweep(self) -> None:
        """Expire old load reports and incompatible pairs, and close the links of idle workers that have left.

        Called periodically.
        """
        self.fleet.changes += self.fleet.incompatible.forget_old()
        for link in self.links:
            link.state.expire_report()
        self._drop_retired()

    def _drop_retired(self) -> None:
        """Close the links of workers that have left the cluster and have no requests of this router."""
        for link in self.links:
            if link.retired and not (link.connected and link.request_ids):
                self._drop(link)

    async def close(self) -> None:
        """Close all links and the channel to the controller."""
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        for link in self.links:
            self._drop(link)
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._publisher is not None:
            await self._publisher.close()
        await self._channel.close()

    def _live(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link.live]

    def _serve(self, links: list[WorkerLink]) -> bool:
        return self._model is not None and _has_both(links) and self._fit(links)

    def _fit(self, links: list[WorkerLink]) -> bool:
        """Return True if two of the workers are a compatible pair, or if one worker of both roles may serve alone.

        The caller has checked that the workers cover both roles.
        """
        incompatible = self.fleet.incompatible
        if not incompatible:
            return True
        alone = self.mode != Mode.DISAGGREGATED or len(links) == 1
        prefills, decodes = _by_role(links)
        pairs = ((prefill, decode) for prefill in prefills for decode in decodes)
        return any(
            alone if prefill is decode else incompatible.fit(prefill.info.peer, decode.info.peer)
            for prefill, decode in pairs
        )

    async def _watch_forever(self) -> None:
        pause = _RETRY_S[0]
        while True:
            try:
                async for message in self.controller.Watch(cluster_pb2.WatchRequest()):
                    self._apply_membership(conversion.from_proto(message, Membership))
                    pause = _RETRY_S[0]
            except grpc.aio.AioRpcError as error:
                # Workers continue to serve without a controller; the router only misses changes until it is back.
                self._log_watch_failure(error)
            except Exception:
                # Watch again: the next message may be valid, and without a watch the membership would become stale.
                log.exception("following the controller at %s failed", self._config.controller_address)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_S[1])

    def _log_watch_failure(self, error: grpc.aio.AioRpcError) -> None:
        address = self._config.controller_address
        if is_refused_peer(error):
            log.error(
                "the controller at %s and this router do not accept each other's certificates: they have different"
                " cluster tokens, or another process has that port; give both the same --token or --token-file. Until"
                " then this router learns of no workers",
                address,
                extra=RECURRING,
            )
        else:
            log.warning("watching the controller at %s failed: %s", address, error.details(), extra=RECURRING)

    def _apply_membership(self, membership: Membership) -> None:
        named = {info.peer: info for info in membership.workers}
        successors = {info.peer.worker_id: info.peer for info in membership.workers}
        for peer, link in list(self._links.items()):
            if peer not in named:
                link.apply_registration(None)
            if successors.get(peer.worker_id, peer) != peer:
                # A newer process of the worker has registered, so the old one is gone: retry its requests now, not
                # after a timeout.
                self._drop(link)
        for peer, info in named.items():
            known = self._links.get(peer)
            if known is None:
                self._links[peer] = self._open(info)
            else:
                known.apply_registration(info)
        if membership.mode not in {"", self.mode}:
            self.mode = membership.mode
            self._observer.on_mode(self.mode)
        self._expected = membership.expected
        self._learn_model(membership)
        self._drop_retired()
        self._observer.on_change()
        self._followed.set()
        self._followed = asyncio.Event()

    def _open(self, info: WorkerInfo) -> WorkerLink:
        config = self._config
        return WorkerLink(
            info,
            self.fleet,
            self._observer,
            router_id=config.router_id,
            token=config.secrets.token,
            rpc_timeout_s=config.rpc_timeout_s,
            silence_s=config.worker_silence_s,
            kv_events=self._kv_events,
        )

    def _adapter_name(self, identity: str) -> str:
        """Return the name of a loaded adapter for its hash; the hash itself if no such adapter is loaded any longer."""
        loaded = () if self._model is None else self._model.facts.adapters
        return next((adapter.name for adapter in loaded if adapter.identity == identity), identity)

    def _drop(self, link: WorkerLink) -> None:
        self._links.pop(link.info.peer, None)
        task = asyncio.create_task(link.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _learn_model(self, membership: Membership) -> None:
        prefills = [w for w in membership.workers if w.takes_prompts]
        decodes = [w for w in membership.workers if w.takes_answers]
        if self.mode == Mode.COLOCATED:
            decodes = [w for w in decodes if w.takes_prompts] or decodes
        if prefills and decodes:
            self._model = ServedModel(
                facts=min((w.model for w in membership.workers), key=lambda facts: facts.max_context),
                prefill_tokens_max=max(w.kv_pages.tokens_in(w.pages_total) for w in prefills),
                decode_tokens_max=max(answer_tokens(w) for w in decodes),
                decode_tokens_min=min(answer_tokens(w) for w in decodes),
                page_tokens=sizes.pop() if len(sizes := {w.page_tokens for w in membership.workers}) == 1 else 0,
            )
        if membership.adapters is not None:
            self.adapters = membership.adapters
            if self._model is not None:
                self._model = replace(self._model, facts=replace(self._model.facts, adapters=self.adapters))


def _has_both(links: list[WorkerLink]) -> bool:
    return all(_by_role(links))


def _by_role(links: list[WorkerLink]) -> tuple[list[WorkerLink], list[WorkerLink]]:
    """Return the links that take prefill work and those that take decode work."""
    return [link for link in links if link.info.takes_prompts], [link for link in links if link.info.takes_answers]
