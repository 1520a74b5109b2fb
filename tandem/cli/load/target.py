"""The cluster under load: its model, whether it is idle, and the speed of a single request."""

import asyncio
import time
from dataclasses import dataclass

from tandem.cli.connection.router import ServerView, model_of, view_of
from tandem.cli.load.client import LoadClient, make_ready
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.workload import Arrival, Block
from tandem.client import Tls
from tandem.protocol.errors import Unavailable
from tandem.protocol.generated.tandem.v1 import inference_pb2

WARM_REQUESTS, WARM_PROMPT, WARM_TOKENS = 8, 256, 32
LONE_REQUESTS, LONE_PROMPT, LONE_TOKENS = 3, 1000, 65
WARM_SEED = 2**62
"""The seed of warm-up prompts. No workload has it, so requests of a load never hit cached warm-up prompts."""
_POLL_S = 0.05
_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Target:
    """A router under load, with its workers, load and model as it reported them in `view`."""

    address: str
    api_key: str
    view: ServerView
    tls: Tls | None = None

    @property
    def context(self) -> int:
        """The maximum number of tokens of prompt and answer together."""
        return self.view.model.max_context

    @property
    def vocab_size(self) -> int:
        """The model's vocabulary size."""
        return self.view.model.vocab_size

    @property
    def on_gpus(self) -> bool:
        """True if at least one worker runs on a GPU."""
        return any(worker.device.startswith("cuda") for worker in self.view.info.workers)

    def as_result(self) -> dict[str, object]:
        """Return the cluster's model, workers and warnings as JSON."""
        workers = sorted(self.view.info.workers, key=lambda worker: worker.worker_id)
        return {
            "model": self.view.model.model,
            "dtype": self.view.model.dtype,
            "workers": [{"id": w.worker_id, "device": w.device, "transport": w.transport} for w in workers],
            "warnings": sorted({warning for w in workers for warning in w.warnings}),
        }


def find_target(address: str, api_key: str = "") -> Target:
    """Query the router's workers, load and model. Raises Unavailable if it does not respond or serves no model yet."""
    return Target(address, api_key, view_of(address, api_key))


def find_model(address: str, api_key: str = "", tls: Tls | None = None) -> Target:
    """Query only the router's model, which every API key may read. Raises Unavailable as `find_target` does."""
    unread = inference_pb2.GetServerInfoResponse(), inference_pb2.GetLoadsResponse()
    return Target(address, api_key, ServerView(*unread, model_of(address, api_key, tls)), tls)


def wait_until_idle(target: Target, within_s: float) -> None:
    """Wait until the router has no requests. Raises Unavailable after `within_s` seconds."""
    deadline_s = time.monotonic() + within_s
    while True:
        loads = view_of(target.address, target.api_key).loads
        if loads.waiting + loads.running == 0:
            return
        if time.monotonic() > deadline_s:
            count = loads.waiting + loads.running
            raise Unavailable(f"the router at {target.address} still has {count} other requests")
        time.sleep(_POLL_S)


def warm_up(target: Target) -> float:
    """Send concurrent and then single requests, and return the duration of an idle cluster's decode step in seconds.

    It is the mean inter-token gap of the fastest single request, because other work slowed the others. Raises
    Unavailable if a request fails.
    """
    return asyncio.run(_warm_up(target))


def touch(target: Target) -> None:
    """Send some concurrent requests, so that the first requests of a load do not include one-time costs.

    Raises Unavailable if a request fails.
    """
    asyncio.run(_touch(target))


async def _touch(target: Target) -> None:
    client = LoadClient(target.address, target.api_key, target.tls)
    try:
        await _ask_some(client, target)
    finally:
        await client.close()


async def _ask_some(client: LoadClient, target: Target) -> None:
    prompt, tokens = min(WARM_PROMPT, target.context // 4), min(WARM_TOKENS, target.context // 4)
    await asyncio.gather(*(_ask(client, target, number, prompt, tokens) for number in range(WARM_REQUESTS)))


async def _warm_up(target: Target) -> float:
    client = LoadClient(target.address, target.api_key, target.tls)
    prompt, tokens = min(LONE_PROMPT, target.context // 4), min(LONE_TOKENS, target.context // 4)
    try:
        await _ask_some(client, target)
        lone = [await _ask(client, target, WARM_REQUESTS + i, prompt, tokens) for i in range(LONE_REQUESTS)]
    finally:
        await client.close()
    return min(map(_step_s, lone))


async def _ask(client: LoadClient, target: Target, number: int, prompt: int, tokens: int) -> RequestRecord:
    arrival = Arrival(0.0, (Block(number, prompt),), tokens)
    ready = make_ready(number, arrival, WARM_SEED, target.vocab_size)
    record = await client.ask(ready, time.monotonic(), _TIMEOUT_S)
    if record.error:
        raise Unavailable(f"a request before the load failed with {record.error}; see the router's log")
    return record


def _step_s(record: RequestRecord) -> float:
    """Return the mean inter-token gap in seconds, without the first gap, which includes the KV hand-over."""
    moments = record.token_s[1:]
    return (moments[-1] - moments[0]) / (len(moments) - 1)
