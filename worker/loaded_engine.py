"""The interface of an engine that is ready to run."""

from typing import Protocol

from costs.roofline import Roofline
from costs.step_cost import CostParameters
from engine.cache.page_pool import PagePool
from kv_transfer.checksums import PageSums
from kv_transfer.handshake import Facts, layout_facts
from kv_transfer.layout import KVLayout
from wire.messages import ModelFacts
from worker.loop import Runner


class LoadedEngine(Runner, Protocol):
    """An engine ready to run."""

    @property
    def pool(self) -> PagePool: ...

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def page_tokens(self) -> int: ...

    @property
    def page_sums(self) -> PageSums: ...

    @property
    def cost_guess(self) -> CostParameters: ...

    @property
    def roofline(self) -> Roofline: ...

    def compatibility_facts(self) -> Facts: ...


def engine_facts(engine: LoadedEngine, layout: KVLayout) -> Facts:
    """Return the engine's facts that the layout does not name."""
    stated = {name for name, _ in layout_facts(layout)}
    return tuple((name, value) for name, value in engine.compatibility_facts() if name not in stated)
