"""The GPU benchmark's bytes and FLOPs against hand-computed values, and its order of launches and reads; no GPU."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.engine import gpu_shares
from benchmarks.engine.device_spans import Span, added_time, idle_share, idle_share_next_to_copies, last_steps
from benchmarks.engine.gpu_engine import GpuEngine
from benchmarks.kernels.attention import Size
from benchmarks.results import scheme_suffix
from tandem.cost_model.roofline import GPU, Roofline
from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.triton_attention_plan import PlanFunction, make_plan
from tandem.engine.model_runner import ModelRunner
from tandem.engine.model_sizes import model_sizes
from tandem.engine.models.load_spec import load_spec
from tandem.engine.models.shapes import write_shape
from tandem.engine.steps.batch import ModelRunnerOutput, StepBatch
from tandem.protocol.kv_pages import KvPages

LAYERS = 32
LAYER = 6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336
"""Parameters of a Llama-3-8B layer: q, k and v; attention output; gate and up; down."""
HEAD = 128256 * 4096
KV_OF_A_TOKEN = 2 * 2 * 8 * 128 * LAYERS
"""Bytes of one token's KV: keys and values in two bytes each, 8 heads of 128 in every layer."""


class RecordedRunner:
    """A runner that computes nothing and records its calls in order."""

    asynchronous = True

    def __init__(self, folder: Any, page_tokens: int = 128) -> None:
        self.spec = load_spec(write_shape("llama-3-8b", folder))
        self.roofline = Roofline(model_sizes(self.spec, 2), GPU)
        self.page_tokens, self.kv_pages = page_tokens, KvPages(page_tokens)
        self.cache = SimpleNamespace(page_bytes=page_tokens * KV_OF_A_TOKEN, pages=64)
        self.facts = SimpleNamespace(max_context=8192)
        self.steps: list[StepBatch] = []
        self.events: list[str] = []

    def launch(self, batch: StepBatch) -> Callable[[], ModelRunnerOutput]:
        number = len(self.steps)
        self.steps.append(batch)
        self.events.append(f"launch {number}")

        def read() -> ModelRunnerOutput:
            self.events.append(f"read {number}")
            return ModelRunnerOutput([0] * len(batch.rows))

        return read


@pytest.fixture
def runner(tmp_path: Any) -> RecordedRunner:
    return RecordedRunner(tmp_path)


@pytest.fixture
def engine(runner: RecordedRunner) -> GpuEngine:
    return GpuEngine(cast(ModelRunner, runner))


@pytest.mark.parametrize(("batch", "context"), [(1, 1024), (32, 1024), (256, 2048)])
def test_a_decode_step_reads_all_weights_once_and_the_kv_of_every_row(
    engine: GpuEngine, batch: int, context: int
) -> None:
    assert engine.decode_bytes([context] * batch) == 2 * (LAYERS * LAYER + HEAD) + batch * context * KV_OF_A_TOKEN


def test_the_bytes_of_llama_3_8b_in_numbers(engine: GpuEngine) -> None:
    assert engine.decode_bytes([1024]) == 15_143_534_592


@pytest.mark.parametrize(("rows", "tokens"), [(1, 512), (1, 2048), (8, 2048)])
def test_a_prefill_multiplies_without_the_embeddings_and_attends_causally(
    engine: GpuEngine, rows: int, tokens: int
) -> None:
    pairs = tokens * tokens / 2
    attention = LAYERS * 32 * 128 * pairs * (2 + 2)
    assert engine.prefill_flops(rows, tokens) == rows * (2 * LAYERS * LAYER * tokens + attention)


def test_the_flops_of_llama_3_8b_in_numbers(engine: GpuEngine) -> None:
    assert engine.prefill_flops(1, 2048) == 29_686_813_949_952


def test_every_step_is_launched_before_the_one_before_is_read(runner: RecordedRunner, engine: GpuEngine) -> None:
    steps = engine.decode_steps(batch=2, first=100, steps=3)
    next(steps)
    assert runner.events == ["launch 0"]
    for _ in steps:
        pass
    assert runner.events == ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "read 2"]
    rows = [[(row.start, row.source) for row in step.rows] for step in runner.steps]
    assert rows == [[(100, None)] * 2, [(101, 0), (101, 1)], [(102, 0), (102, 1)]]
    assert not {*runner.steps[0].rows[0].page_ids} & {*runner.steps[0].rows[1].page_ids}


def test_the_chunks_of_prompts_that_follow_each_other_are_launched_without_a_pause(
    runner: RecordedRunner, engine: GpuEngine
) -> None:
    engine.back_to_back_seconds(tokens=300, chunk=200, prompts=1)
    launches = ["launch 0", "launch 1", "read 0", "launch 2", "read 1", "launch 3", "read 2", "read 3"]
    assert runner.events == launches
    rows = [[(row.start, len(row.token_ids), row.draw is not None) for row in step.rows] for step in runner.steps]
    assert rows == [[(0, 200, False)], [(200, 100, True)]] * 2


def test_rows_that_the_cache_does_not_hold_are_left_out(
    engine: GpuEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pool has 64 pages of 128 tokens: seven rows of slightly more than 1,024 tokens, each on nine pages."""
    assert engine.holds(7, 1048)
    assert not engine.holds(8, 1048)
    measured: list[int] = []

    def seconds(_: GpuEngine, batch: int, *_others: object, **_named: object) -> float:
        measured.append(batch)
        return 1.0

    def device_seconds(_: GpuEngine, contexts: Sequence[int]) -> float:
        measured.append(len(contexts))
        return 1.0

    monkeypatch.setattr(GpuEngine, "decode_seconds", seconds)
    monkeypatch.setattr(GpuEngine, "graph_seconds", device_seconds)
    monkeypatch.setattr(GpuEngine, "decode_spans", lambda *_: STEP)
    monkeypatch.setattr(gpu_shares, "BATCHES", (1, 7, 8, 32))
    results = gpu_shares._decode(engine, 1e12)
    assert set(measured) == {1, 7}
    assert results["decode_ms_b7"] == 1000
    assert "decode_ms_b8" not in results
    assert "decode b8    left out: the KV cache holds fewer rows of 1024 tokens" in capsys.readouterr().out


def test_uneven_rows_are_a_step_of_their_own(
    runner: RecordedRunner, engine: GpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the bytes of the weights and of each row's KV; no row exceeds the engine's context."""
    steps: list[Sequence[int]] = []

    def device_seconds(_: GpuEngine, contexts: Sequence[int]) -> float:
        steps.append(contexts)
        return 0.01

    monkeypatch.setattr(GpuEngine, "graph_seconds", device_seconds)
    runner.facts = SimpleNamespace(max_context=2048)
    results = gpu_shares._uneven_decode(engine, 128, 4e12)
    (contexts,) = steps
    assert len(contexts) == 128
    assert min(contexts) < 256
    assert max(contexts) == 2047
    read = 2 * (LAYERS * LAYER + HEAD) + sum(contexts) * KV_OF_A_TOKEN
    assert results["decode_uneven_bw_ratio_b128"] == round(read / 0.01 / 4e12, 4)
    assert results["decode_uneven_device_ms_b128"] == 10


def test_rows_of_any_lengths_have_pages_of_their_own(engine: GpuEngine) -> None:
    pages = engine._pages_of([(0, 1), (0, 128), (100, 129), (0, 300)])
    assert [len(row) for row in pages] == [1, 1, 2, 3]
    assert [page for row in pages for page in row] == list(range(7))
    with pytest.raises(ValueError, match="2 rows need 72 pages of 64"):
        engine._pages_of([(0, 128 * 70), (0, 129)])


def test_walking_is_compared_with_rows_that_are_all_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    splits: dict[int, int] = {}

    def seconds(size: Size, _: object, choose: PlanFunction = make_plan) -> float:
        rows = len(size.lengths)
        plan = choose(rows, 8, 128, max(size.lengths), torch.bfloat16, 132)
        if plan.units:
            return 2e-6
        splits[rows] = plan.splits
        return 3e-6

    monkeypatch.setattr(gpu_shares, "make_inputs", lambda _: None)
    monkeypatch.setattr(gpu_shares, "call_seconds", seconds)
    results = gpu_shares._attention(AttentionShape(32, 8, 128, 1.0), torch.bfloat16, 1e12)
    assert [results[f"attention_split_over_walking_{rows}_uneven"] for rows in (12, 48)] == [1.5, 1.5]
    assert splits == {1: 32, 12: 2, 48: 1}


def test_codes_and_scales_count_as_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(32, 8, 128, 1.0)
    assert Size("", (1000,), shape).bytes == 1000 * 2 * 8 * 256
    assert Size("", (1000,), shape, torch.int8).bytes == 1000 * 2 * 8 * 132
    monkeypatch.setattr(gpu_shares, "make_inputs", lambda _: None)
    monkeypatch.setattr(gpu_shares, "call_seconds", lambda *_: 1e-3)
    results = gpu_shares._attention(shape, torch.int8, 1e12)
    assert results["attention_bw_ratio_64x2048_int8"] == round(64 * 2048 * 2 * 8 * 132 / 1e9, 4)


def test_a_result_names_the_scheme_and_how_much_faster_it_is() -> None:
    assert scheme_suffix("fp8", "int8") == "_fp8_kv-int8"
    assert scheme_suffix(None, "auto") == ""
    before = {"before_decode_ms_b8": 4.0, "before_copy": 3.0, "before_prefill_ms_1x512": 2.0}
    now = {"decode_ms_b8": 2.5, "copy": 3.0}
    assert gpu_shares._over_before(before, now) == {"decode_over_before_b8": 1.6}


STEP = [Span(0, 2, "Memcpy HtoD"), Span(3, 10, "first"), Span(8, 14, "second"), Span(15, 17, "first")]
"""One microsecond after the copy, two kernels that overlap, and one more after a gap."""


def test_the_device_is_idle_where_nothing_runs() -> None:
    end = Span(19, 20, "Memcpy DtoH")
    assert idle_share([*STEP, end]) == pytest.approx((1 + 1 + 2) / 20)
    assert idle_share_next_to_copies([*STEP, end]) == pytest.approx((1 + 2) / 20)
    assert idle_share([Span(0, 9, "long"), Span(1, 2, "inside"), Span(9, 10, "next")]) == 0


def test_a_kernel_adds_the_time_after_the_end_of_all_earlier_kernels() -> None:
    assert added_time(STEP) == {"Memcpy HtoD": 2, "first": 7 + 2, "second": 4}
    assert added_time([Span(0, 9, "long"), Span(1, 2, "inside")]) == {"long": 9, "inside": 0}


def test_the_last_steps_of_a_trace() -> None:
    spans = [Span(n, n + 0.5, f"{n % 3}") for n in range(12)]
    assert [span.start for span in last_steps(spans, steps=3, of=4)] == list(range(3, 12))
