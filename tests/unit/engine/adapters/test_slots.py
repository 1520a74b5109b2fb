"""Adapters that are loaded into slots while the engine runs, and the slots that they leave."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.engine.adapters.folder import AdapterFolder
from tandem.engine.adapters.load import load_adapters, slot_bytes
from tandem.engine.adapters.reader import read_adapter
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.load_spec import load_spec
from tandem.engine.steps.batch import StepBatch
from tandem.protocol.errors import FailedPrecondition, InvalidArgument, ModelError, NotFound, ResourceExhausted
from tandem.protocol.messages import AdapterFacts
from tests.adapters import DENSE, TinyAdapter
from tests.factories import tiny_engine_config, write_tiny_model
from tests.unit.engine.adapters.test_adapters import TOLERANCE, logits_of, rows_of

pytestmark = pytest.mark.usefixtures("adapters_read_here")

FIRST, SECOND = TinyAdapter(seed=1, rank=5), TinyAdapter(seed=2, modules=DENSE, alpha=3)


def put(slots: AdapterSlots, name: str, path: Path, used: tuple[str, ...] = ()) -> AdapterFacts:
    """Loads an adapter as a worker does."""
    folder = slots.read(path)
    adapter = AdapterFacts(name, folder.identity, str(path))
    slots.fill(slots.claim(folder.identity, used), adapter, folder)
    return adapter


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def test_a_loaded_adapter_equals_the_merged_model_and_so_does_the_next_in_its_slot(base: Path, tmp_path: Path) -> None:
    """Also where the second changes fewer modules: nothing of the first is left in the slot."""
    config = tiny_engine_config(base, runtime_loras=True, max_loras=1)
    runner, without = ModelRunner.load(config), ModelRunner.load(tiny_engine_config(base))
    for number, adapter in enumerate((FIRST, SECOND)):
        adapter_read = put(runner.adapters, "it", adapter.write(tmp_path / f"adapter {number}"))
        assert runner.adapters.number(adapter_read.identity) == 1
        merged = ModelRunner.load(tiny_engine_config(adapter.merged(tmp_path / f"merged {number}")))
        wanted = torch.cat((logits_of(merged, [0]), logits_of(without, [0])), dim=1)
        torch.testing.assert_close(logits_of(runner, [1, 0]), wanted, atol=TOLERANCE, rtol=TOLERANCE)
        assert runner.adapters.unload("it")


def test_steps_of_others_do_not_see_a_slot_that_is_written(base: Path, tmp_path: Path) -> None:
    """The bits of another adapter's rows and of the base model's are the same while adapters come and go."""
    paths = [FIRST.write(tmp_path / "first"), SECOND.write(tmp_path / "second")]
    config = tiny_engine_config(base, runtime_loras=True, max_loras=2)
    runner = ModelRunner.load(config, kernels=ReferenceKernels())
    put(runner.adapters, "stays", paths[0])
    wanted, over = logits_of(runner, [1, 0]), threading.Event()

    def change() -> None:
        while not over.is_set():
            put(runner.adapters, "changes", paths[1])
            runner.adapters.unload("changes")
            put(runner.adapters, "another", paths[0], used=(read_adapter(paths[0]).identity,))
            runner.adapters.unload("another")

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(20):
            assert torch.equal(logits_of(runner, [1, 0]), wanted)
    finally:
        over.set()
        changing.join()


class Files:
    """Adapters whose hash is the name of their folder."""

    def __init__(self) -> None:
        self.written: list[tuple[int, str]] = []
        self.broken = False

    def read(self, path: Path) -> AdapterFolder:
        return AdapterFolder(path, path.name, {})

    def write(self, slot: int, folder: AdapterFolder) -> None:
        if self.broken:
            raise ModelError("it cannot be read")
        self.written.append((slot, folder.identity))


def test_requests_that_came_before_keep_an_unloaded_adapter() -> None:
    slots = AdapterSlots(2, files := Files())
    for name in ("a", "b"):
        put(slots, name, Path(name))
    assert slots.unload("a")
    assert not slots.unload("a")
    assert [facts.name for facts in slots.facts] == ["b"]
    assert slots.number("a") == 1
    with pytest.raises(ResourceExhausted, match="all 2 slots for adapters are in use, 1 of them loaded; 'a' still"):
        put(slots, "c", Path("c"), used=("", "a"))
    assert slots.number("a") == 1, "a refusal has changed nothing"
    put(slots, "c", Path("c"), used=("b",))
    assert files.written == [(0, "a"), (1, "b"), (0, "c")]
    with pytest.raises(NotFound, match="it was unloaded"):
        slots.number("a")
    with pytest.raises(ResourceExhausted, match="unload one, or start with more --max-loras"):
        put(slots, "d", Path("d"))


def test_an_adapter_that_comes_back_finds_its_slot() -> None:
    slots = AdapterSlots(2, files := Files())
    put(slots, "a", Path("a"))
    slots.unload("a")
    put(slots, "other name", Path("a"), used=("a",))
    assert [(facts.name, facts.identity) for facts in slots.facts] == [("other name", "a")]
    assert files.written == [(0, "a")]


def test_a_failed_load_leaves_a_free_slot() -> None:
    slots = AdapterSlots(1, files := Files())
    files.broken = True
    with pytest.raises(ModelError):
        put(slots, "a", Path("a"))
    assert not slots.facts
    files.broken = False
    assert slots.number(put(slots, "b", Path("b")).identity) == 1


def test_files_that_change_meanwhile_are_refused(base: Path, tmp_path: Path) -> None:
    slots = ModelRunner.load(tiny_engine_config(base, runtime_loras=True, max_loras=1)).adapters
    folder = slots.read(path := FIRST.write(tmp_path / "a"))
    replace(FIRST, seed=9).write(path)
    with pytest.raises(ModelError, match="changed while it was read"):
        slots.fill(slots.claim(folder.identity, ()), AdapterFacts("a", folder.identity, str(path)), folder)
    assert not slots.facts


def test_limits_and_engines_without_slots(base: Path, tmp_path: Path) -> None:
    slots = ModelRunner.load(tiny_engine_config(base, runtime_loras=True, max_loras=1, max_lora_rank=4)).adapters
    with pytest.raises(InvalidArgument, match="max_lora_rank: is 4"):
        slots.read(FIRST.write(tmp_path / "a"))
    with pytest.raises(ModelError, match="is no adapter"):
        slots.read(tmp_path / "nothing")
    with pytest.raises(FailedPrecondition, match="--allow-runtime-lora-updating"):
        ModelRunner.load(tiny_engine_config(base)).adapters.read(tmp_path / "a")


def test_memory_of_the_slots(base: Path) -> None:
    """That of all tables, as the host's memory is checked before they are allocated."""
    config = tiny_engine_config(base, runtime_loras=True, max_loras=3, max_lora_rank=17)
    spec = load_spec(base)
    loaded = load_adapters(config, spec, allocate_parameters(spec, torch.float32, torch.device("cpu")))
    held = sum(table.a.nbytes + table.b.nbytes for table in loaded.tables.values())
    assert held == slot_bytes(config, spec, torch.float32) > 0


def test_a_step_without_adapters_in_an_engine_with_empty_slots(base: Path) -> None:
    runner = ModelRunner.load(tiny_engine_config(base, runtime_loras=True))
    assert torch.isfinite(runner.logits(StepBatch(rows_of([0, 0], start=0, tokens=5)))).all()
