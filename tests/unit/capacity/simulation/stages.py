"""Small clusters whose steps can be computed by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from router.config import RouterConfig
from tandem.capacity.simulation.cluster import VirtualCluster
from tandem.capacity.simulation.drafts import Drafts
from tandem.capacity.simulation.network import Network
from tandem.capacity.simulation.prompt import VirtualPrompt, page_names
from tandem.capacity.simulation.request import LoadRequest
from tandem.capacity.simulation.spec import Device, WorkerSpec
from tandem.engine.config import EngineConfig
from tandem.protocol.cost_parameters import CostParameters
from tandem.protocol.messages import ModelFacts, Role
from tandem.protocol.mode import Mode
from tandem.settings.model import ModelSettings
from tandem.settings.slo import BEST_EFFORT, SloClass
from tandem.worker.config import WorkerConfig

PAGE_TOKENS = 16
COSTS = CostParameters(
    base_s=4e-3, prompt_base_s=0.0, token_s=2e-5, pair_s=0.0, row_s=1e-3, context_s=0.0, free_tokens=0, observed=1
)
"""A step of n prompt tokens and m decode rows takes 4 + n / 50 + m milliseconds."""
NETWORK = Network(1e-3, 5e-4, 1e-3, 3e-4, 1e18, None)
MODEL = ModelFacts("model", 1000, 8192, (), "float32")


def cluster(
    mode: Mode,
    roles: list[Role],
    *,
    pages: int = 4096,
    jumps: bool = True,
    drafts: Drafts | None = None,
    **settings: Any,
) -> VirtualCluster:
    """A cluster with one worker for each role."""
    device = Device(COSTS, COSTS, pages, PAGE_TOKENS, 1024)
    engine = EngineConfig.of(Path(), max_step_tokens=2048, max_batch_requests=64)
    specs = [
        WorkerSpec(WorkerConfig(f"{role.value}-{number}", role, engine, **settings), device, MODEL, drafts)
        for number, role in enumerate(roles)
    ]
    return VirtualCluster(
        specs, RouterConfig("router", ModelSettings(Path(), ("model",)), "", mode=mode), NETWORK, jumps
    )


def request(
    due_s: float, tokens: int, answer: int, *, blocks: tuple[int, ...] = (), key: int = 0, slo: SloClass = BEST_EFFORT
) -> LoadRequest:
    """A request with a prompt of `tokens`, all of `key`, or of equal `blocks`."""
    names = blocks or (key,)
    segments = [(block, 0, tokens // len(names)) for block in names]
    return LoadRequest(due_s, VirtualPrompt(key, tokens, page_names(segments, PAGE_TOKENS)), answer, slo)


def moments(outcome: Any) -> list[float]:
    """Returns the tokens' times at the client in milliseconds after the due time."""
    due_s = outcome.asked.due_s
    return [round((moment - due_s) * 1e3, 6) for moment in outcome.token_s(NETWORK.event_s)]


def with_costs(**changes: float) -> CostParameters:
    return replace(COSTS, **changes)
