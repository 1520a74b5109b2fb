"""The model runner: runs the steps of one model over one paged KV cache, one step at a time."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.cache.page_checksums import PageChecksums, page_checksums
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.paged_cache import PagedCache
from tandem.engine.cache.tiers.group_copies import GroupPageCopies, RankCopies, SharedCopies
from tandem.engine.cache.tiers.page_copies import PageCopies
from tandem.engine.ceilings import measure_ceilings
from tandem.engine.config import EngineConfig
from tandem.engine.config.sharding import PagePart
from tandem.engine.cuda.step_graph import StepGraph
from tandem.engine.device import device_name
from tandem.engine.graph_use import GraphUse
from tandem.engine.host_stepper import Forward
from tandem.engine.kernels.base import Kernels
from tandem.engine.load_engine import LoadedParts, load_parts, load_rank
from tandem.engine.memory import naming_the_setting
from tandem.engine.model_sizes import cost_guess, roofline
from tandem.engine.models.rope import rope_facts
from tandem.engine.parallel.collectives import Collectives
from tandem.engine.parallel.step_stream import GraphStep, RankStep
from tandem.engine.steps.batch import ModelRunnerOutput, PendingStep, StepBatch
from tandem.engine.steps.step_packer import PackedStep
from tandem.engine.warm_up import check_activations, warm_up
from tandem.engine.weights.checkpoint import Progress


class ModelRunner:
    """Runs the steps of one model. It owns the weights and the KV cache as long as it exists.

    Not thread-safe, except for `pool`: only the worker's loop thread calls it.
    """

    def __init__(self, loaded: LoadedParts) -> None:
        """Create a runner from loaded parts; callers use `load`."""
        self.spec = loaded.spec
        self.facts, self.adapters, self.dtype = loaded.facts, loaded.adapters, loaded.dtype
        self.cache = cache = loaded.cache
        self.pool = PagePool(cache.pages)
        self.page_tokens, self.kv_pages = cache.page_tokens, cache.kv_pages
        self.page_parts = loaded.page_parts
        self.page_sums = self._page_sums()
        self.cost_guess = cost_guess(loaded.computed_spec, cache, self.dtype.itemsize)
        self.roofline = roofline(loaded.computed_spec, cache, self.dtype.itemsize)
        self.device_name = device_name(cache.device)
        self._revision = loaded.revision
        self.stepper, self.expert_tokens, self.drawn_hidden = loaded.stepper, loaded.expert_tokens, loaded.drawn_hidden
        self.begin_answer, self.allowed_drafts = loaded.begin_answer, loaded.allowed_drafts
        self.draft_proposer = loaded.draft_proposer
        self.other_ranks: Sequence[RankCopies] = ()
        """The pages of the ranks that divide the model with this one; the rank group sets them."""

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        kernels: Kernels | None = None,
        collectives: Collectives | None = None,
        on_step: Callable[[RankStep], None] | None = None,
    ) -> "ModelRunner":
        """Load the model and allocate the KV cache.

        `kernels` are by default the fastest for the device; if they are passed in, steps run one by one, without CUDA
        graphs. The first rank of a group passes its `collectives`, and `on_step`, which sends each step to the other
        ranks (`Follower`). Raises ModelError if the model cannot be served, InvalidArgument if a setting cannot be met.
        """
        loaded = load_parts(
            config,
            progress,
            kernels=kernels,
            load_another=cls.load,
            collectives=collectives,
            on_step=on_step,
        )
        runner = cls(loaded)
        with naming_the_setting(loaded.cache.device):
            # Checked before anything is sampled, because some models overflow in float16.
            if loaded.dtype == torch.float16:
                check_activations(runner.logits, loaded.cache, min(runner.facts.max_context, runner.facts.vocab_size))
            warm_up(runner.run, loaded.cache, runner.facts.max_context, progress)
        runner.expert_tokens.reset()
        return runner

    def page_copies(self) -> PageCopies:
        """Return copies of the pages of the KV cache, which one thread may use in parallel with the steps."""
        storage, sums = self.cache.storage, self._page_sums()
        if self.other_ranks:
            return GroupPageCopies(storage, sums, self.page_tokens, self.other_ranks)
        return PageCopies(storage, sums, self.page_tokens)

    def _page_sums(self) -> PageChecksums:
        return page_checksums(*self.cache.views, parts=self.page_parts)

    @property
    def asynchronous(self) -> bool:
        """True if `launch` returns before the step has run, so that the next step can be prepared meanwhile."""
        return self.stepper.asynchronous

    @property
    def graph_use(self) -> GraphUse:
        """The counters of steps with and without CUDA graphs; any thread may read them."""
        return self.stepper.graph_use

    def run(self, batch: StepBatch) -> ModelRunnerOutput:
        """Run a step: store the KV of every row, and sample a token for each row that has a sampling input (`draw`).

        Raises Internal for a malformed batch.
        """
        return self.launch(batch)()

    def launch(self, batch: StepBatch) -> PendingStep:
        """Launch a step without waiting for its result if `asynchronous`; otherwise run it as `run` does.

        At most two steps may be in flight. The caller reads their results in the order of the launches, and calls
        `draw` of the newer one after it has added the older one's tokens to the histories. The pages of a
        step's rows may be given to another owner only after its result is read.
        """
        with torch.inference_mode():
            return self.stepper.launch(batch)

    def logits(self, batch: StepBatch, *, every_token: bool = False) -> Tensor:
        """Return the logits [sampled rows, vocab] in the model's dtype, on its device.

        With `every_token` they are [tokens, vocab], one for each token of each row, to score prompts. They are valid
        until the next step.
        """
        with torch.inference_mode():
            logits = self.stepper.logits(batch, every_token=every_token)
            if logits is None:
                return torch.empty(0, self.spec.vocab_size)
            return logits if every_token else logits[: len(batch.draws)]

    def measure_ceilings(self, threads: int | None = None) -> None:
        """Measure the peak FLOP/s and memory bandwidth for `roofline`.

        On a CPU, `threads` threads are used (None = all cores). Nothing else may compute during the measurement.
        """
        self.roofline = replace(self.roofline, ceilings=measure_ceilings(self.cache.device, self.dtype, threads))

    def compatibility_facts(self) -> tuple[tuple[str, str], ...]:
        """Return the properties, as (name, value), that two workers must have in common for KV transfers."""
        return (("model", self._revision), ("dtype", self.facts.dtype), *self.cache.facts, *rope_facts(self.spec))


class Follower:
    """The engine of a rank other than the first: it runs its part of the model in each step that the first rank sends.

    It owns the rank's part of the model, of the adapters and of the KV cache, and has no requests.
    """

    def __init__(
        self,
        cache: PagedCache,
        parts: Sequence[PagePart],
        adapters: AdapterSlots,
        forward: Forward,
        graphs: Sequence[StepGraph],
    ) -> None:
        """Create a follower from loaded parts; callers use `load` instead."""
        self.cache, self.adapters = cache, adapters
        self.page_sums = page_checksums(*cache.views, parts=parts)
        self._forward, self._graphs = forward, graphs

    @classmethod
    def load(cls, config: EngineConfig, collectives: Collectives, *, kernels: Kernels | None = None) -> "Follower":
        """Load this rank's part of the model, and allocate its KV cache. Raises as `ModelRunner.load` does."""
        model, cache, parts, adapters, graphs = load_rank(config, collectives, kernels=kernels)
        return cls(cache, parts, adapters, Forward(model, cache), graphs)

    def share_pages(self, path: Path) -> SharedCopies:
        """Return copies between the rank's pages and the memory in the file `path`, for one thread at a time."""
        return SharedCopies(PageCopies(self.cache.storage, self.page_sums, self.cache.page_tokens), path)

    def run(self, steps: Iterable[RankStep]) -> None:
        """Run `steps` in order, and return after the last one; on a GPU, they are only launched."""
        with torch.inference_mode():
            newest: StepGraph | PackedStep | None = None
            for step in steps:
                if isinstance(step, GraphStep):
                    newest = self._graphs[step.graph]
                    newest.replay(step.words)
                elif isinstance(step, PackedStep):
                    newest = step
                    self._forward(step, None)
                elif isinstance(newest, StepGraph):
                    newest.accept_drafts(step.counts)
                elif newest is not None:
                    self._forward.accept_drafts(newest, step.counts.to(self.cache.device, torch.int32))
