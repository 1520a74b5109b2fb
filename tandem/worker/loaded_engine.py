"""The interface of an engine that is ready to run."""

from collections.abc import Sequence
from typing import Protocol

from kv_transfer.checksums import PageSums
from kv_transfer.handshake import Facts, layout_facts
from kv_transfer.layout import KVLayout
from tandem.cost_model.roofline import Roofline
from tandem.cost_model.step_cost import CostParameters
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.tiers.page_copies import PageCopies
from tandem.engine.speculation.load_draft import MakeProposer
from tandem.engine.steps.batch import PendingStep, StepBatch
from tandem.engine.steps.sampling_metadata import History
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import ModelFacts


class Runner(Protocol):
    """The part of an engine that runs steps."""

    @property
    def asynchronous(self) -> bool:
        """True if `launch` returns before the step has run."""

    def launch(self, batch: StepBatch) -> PendingStep:
        """Launch one step and return its pending result."""


class LoadedEngine(Runner, Protocol):
    """An engine that is ready to run."""

    @property
    def pool(self) -> PagePool:
        """The pool of KV pages."""
        ...

    @property
    def facts(self) -> ModelFacts:
        """The facts of the model."""
        ...

    @property
    def adapters(self) -> AdapterSlots:
        """The adapter slots: those with the adapters that requests may name, and free ones."""
        ...

    @property
    def page_tokens(self) -> int:
        """The number of tokens of a KV page."""
        ...

    @property
    def kv_pages(self) -> KvPages:
        """The page geometry: how many KV pages a request holds."""
        ...

    @property
    def page_sums(self) -> PageSums:
        """The function that computes the checksums of KV pages."""
        ...

    @property
    def cost_guess(self) -> CostParameters:
        """The predicted cost parameters of steps on this device, used until steps have been measured."""
        ...

    @property
    def roofline(self) -> Roofline:
        """The roofline of the model on this kind of device."""
        ...

    @property
    def draft_proposer(self) -> MakeProposer | None:
        """The function that makes a proposer with the model's trained draft weights; None if none were loaded."""
        ...

    def page_copies(self) -> PageCopies:
        """Return copies of the KV pages, which one thread may use in parallel with the steps."""
        ...

    def begin_answer(self, history: History, grammar: str, /) -> None:
        """Compile a grammar and advance it to the newest token of an answer, before a step needs it.

        Raises InvalidArgument if that fails. Any thread may call it.
        """
        ...

    def allowed_drafts(self, history: History, grammar: str, drafts: Sequence[int], /) -> int:
        """Return the number of leading draft tokens that the grammar allows after the answer so far.

        The next step may verify these tokens. Called on the engine thread only.
        """
        ...

    def compatibility_facts(self) -> Facts:
        """Return the facts, as (name, value), that must be equal on two workers that transfer KV to each other."""
        ...


def engine_facts(engine: LoadedEngine, layout: KVLayout) -> Facts:
    """Return the engine's compatibility facts, without those that `layout` states already."""
    stated = {name for name, _ in layout_facts(layout)}
    return tuple((name, value) for name, value in engine.compatibility_facts() if name not in stated)
