"""The metrics that an endpoint picker of the Gateway API Inference Extension reads, under vLLM's names.

The picker chooses among several clusters by the load of their routers, so the values are those of the whole cluster. It
reads vLLM's names unless it is configured otherwise. The metrics are those of the model server protocol:
https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/003-model-server-protocol
"""

from __future__ import annotations

import time

from router.placement.worker_state import WorkerState
from router.requests.dispatch import Dispatcher
from tandem.metrics.family import Family, Kind
from tandem.metrics.registry import Facts, Registry

PICKER_PATH = "/metrics/endpoint-picker"


def _gauge(name: str, text: str, *labels: str) -> Family:
    return Family(name, Kind.GAUGE, text, labels, prefix="vllm:")


WAITING = _gauge("num_requests_waiting", "Requests in the router's queue.")
RUNNING = _gauge("num_requests_running", "Requests assigned to workers.")
KV_USAGE = _gauge(
    "kv_cache_usage_perc", "Share of the decode workers' KV pages that are in use or reserved, from 0 to 1."
)
CACHE_CONFIG = _gauge(
    "cache_config_info", "1; tokens of a KV page, and KV pages of all decode workers.", "block_size", "num_gpu_blocks"
)
LORA = _gauge(
    "lora_requests_info",
    "Time of this reading in seconds since 1970; the adapters, which are all in the workers' memory.",
    "max_lora",
    "running_lora_adapters",
    "waiting_lora_adapters",
)


def picker_registry(model: str, dispatcher: Dispatcher) -> Registry:
    """Return the registry of the metrics of the cluster that serves `model`."""
    registry = Registry({"model_name": model})
    registry.read(lambda: _facts(dispatcher))
    return registry


def _facts(dispatcher: Dispatcher) -> Facts:
    facts: dict[Family, float | dict[tuple[str, ...], float]] = {
        WAITING: dispatcher.waiting,
        RUNNING: dispatcher.running,
    }
    decodes: list[WorkerState] = [worker for worker in dispatcher.pool.views() if worker.decodes]
    model = dispatcher.pool.model
    if decodes and model is not None:
        pages = sum(worker.info.pages_total for worker in decodes)
        facts[KV_USAGE] = 1 - sum(worker.pages_free for worker in decodes) / pages
        facts[CACHE_CONFIG] = {(str(model.page_tokens), str(pages)): 1}
    if model is not None and model.facts.adapters:
        names = [adapter.name for adapter in model.facts.adapters]
        facts[LORA] = {(str(len(names)), ",".join(names), ""): time.time()}
    return facts
