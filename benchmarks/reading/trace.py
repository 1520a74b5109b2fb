"""Records which of a tree's files run in a decode step, with drafts and without, a prefill step, and so on.

This file is run as a script, in a process of its own, with the tree as working directory and PYTHONPATH; it prints a
JSON object of paths by name. It relies on modules that older trees have as well: `tests/worker_pair.py`, two workers in
one process, here over the real engine with a tiny model on the CPU, and `tests/unit/capacity/simulation/stages.py`.

A file counts if one of its functions is called, or an object of one of its dataclasses is made. Tests, `telemetry/` and
the kernels below `tandem/engine/kernels/` do not count.
"""

import asyncio
import importlib
import importlib.util
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TREE = Path.cwd()
SKIPPED = ("tests/", "telemetry/", "benchmarks/", "tandem/engine/kernels/", "simulation/", ".venv/")
LOOP_FILE, LOOP_STEP = "tandem/worker/loop.py", "_step"
HANDOVER_ROOTS = ("prefill_worker/handoff.py", "decode_worker/admission.py", "tandem/worker/servicer.py")
PLACEMENT_ROOTS = ("router/placement", "router/binder.py")
"""Files that place requests; router/binder.py exists in older trees only."""
STEP_TOKENS, PROMPT_TOKENS, ANSWER_TOKENS = 32, 200, 48
STEADY_TOKENS, OBSERVED_TOKENS = 4, 36
"""Tokens of the answers before decode steps are recorded, and when recording ends."""


class Recorder:
    """Collects files by name: of each step of a step loop, or of all calls below functions of given files."""

    def __init__(self) -> None:
        self.steps: dict[str, list[frozenset[str]]] = {}
        self.below: dict[str, set[str]] = {}
        self._step_name = ""
        self._roots: dict[str, tuple[str, ...]] = {}
        self._files: dict[CodeType, str] = {}
        self._thread = threading.local()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observes the calls of this thread, and of all threads started within the context."""
        threading.setprofile(self._observe)
        sys.setprofile(self._observe)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def recording_steps(self, name: str) -> Iterator[None]:
        """Records every step of a step loop that begins and ends within the context."""
        self.steps[name], self._step_name = [], name
        try:
            yield
        finally:
            self._step_name = ""

    @contextmanager
    def recording_below(self, name: str, roots: tuple[str, ...]) -> Iterator[None]:
        """Records the calls below functions of files whose paths begin with one of `roots`."""
        self.below[name], self._roots[name] = set(), roots
        try:
            yield
        finally:
            del self._roots[name]

    def typical_step(self, name: str) -> list[str]:
        """Returns the files of the step that was recorded most often."""
        return sorted(Counter(self.steps[name]).most_common(1)[0][0])

    def _observe(self, frame: FrameType, event: str, _: object) -> None:
        if event == "return":
            if getattr(self._thread, "step_frame", None) is frame:
                self.steps[self._thread.name].append(frozenset(self._thread.files))
                self._thread.step_frame = None
            return
        if event != "call":
            return
        file = self._file(frame)
        if not file:
            return
        if self._step_name and file == LOOP_FILE and frame.f_code.co_name == LOOP_STEP:
            self._thread.step_frame, self._thread.files, self._thread.name = frame, set(), self._step_name
        if getattr(self._thread, "step_frame", None) is not None:
            self._thread.files.add(file)
        for name, roots in list(self._roots.items()):
            if file not in self.below[name] and self._is_below(frame, roots):
                self.below[name].add(file)

    def _is_below(self, frame: FrameType | None, roots: tuple[str, ...]) -> bool:
        while frame is not None:
            if self._inside(frame.f_code).startswith(roots):
                return True
            if self._inside(frame.f_code) == LOOP_FILE:
                return False
            frame = frame.f_back
        return False

    def _file(self, frame: FrameType) -> str:
        code = frame.f_code
        if code.co_name == "<module>":
            return ""
        if code.co_filename.startswith("<"):
            return _file_of_class(frame)
        return self._inside(code)

    def _inside(self, code: CodeType) -> str:
        if code not in self._files:
            self._files[code] = _relative(code.co_filename)
        return self._files[code]


def _file_of_class(frame: FrameType) -> str:
    """Returns the file that declares the class whose generated constructor is called."""
    made = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
    module = sys.modules.get(type(made).__module__) if made is not None else None
    return _relative(getattr(module, "__file__", None) or "")


def _relative(path: str) -> str:
    """Returns the path inside the tree; empty for files outside of it and for those that do not count."""
    file = Path(path)
    if not path or not file.is_relative_to(TREE):
        return ""
    relative = file.relative_to(TREE).as_posix()
    return "" if relative.startswith(SKIPPED) else relative


def engine_factory(folder: Path) -> Callable[[int], Any]:
    """Returns a factory of a worker pair's engines: the real engine with a tiny model on the CPU."""
    from tandem.engine.model_runner import ModelRunner
    from tandem.worker.process import layout_of
    from tests.factories import tiny_engine_config, write_tiny_model

    model = write_tiny_model(folder / "model", max_position_embeddings=512)

    def make(_pages: int) -> Any:
        runner: Any = ModelRunner.load(tiny_engine_config(model))
        runner.layout, runner.let_go = layout_of(runner.cache), lambda: None
        return runner

    return make


def prompt(first: int) -> list[int]:
    """Returns a prompt that begins with this token; the tiny model's vocabulary has more than a hundred."""
    return [first + number % 100 for number in range(PROMPT_TOKENS)]


def speculation(method: str) -> dict[str, Any]:
    """Returns the setting of workers for a method of speculative decoding; none in trees without it."""
    if importlib.util.find_spec("tandem.protocol.speculation_method") is None:
        return {}
    return {"speculate": importlib.import_module("tandem.protocol.speculation_method").SpeculationMethod(method)}


async def trace_drafts(recorder: Recorder) -> None:
    """Records decode steps whose drafts are verified."""
    from tandem.protocol.messages import SamplingParams

    pairs: Any = importlib.import_module("tests.worker_pair")
    sampling = SamplingParams(max_tokens=10 * ANSWER_TOKENS, ignore_eos=True)
    async with pairs.WorkerPair(both=True, max_step_tokens=STEP_TOKENS, **speculation("ngram")) as pair:
        answer = pair.send("repeats itself", prompt(2), sampling)
        await pairs.until(lambda: len(answer.tokens) > 5 * ANSWER_TOKENS)
        with recorder.recording_steps("decode step with drafts"):
            await pairs.until(lambda: answer.finish)


async def trace_workers(recorder: Recorder, folder: Path) -> None:
    """Records steps and hand-overs of a pair of workers; the first request only compiles and connects."""
    from tandem.protocol.messages import SamplingParams

    pairs: Any = importlib.import_module("tests.worker_pair")
    pairs.FakeEngine = engine_factory(folder)
    sampling = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    async with pairs.WorkerPair(max_step_tokens=STEP_TOKENS, **speculation("off")) as pair:
        first = pair.send("first", prompt(2), sampling)
        await pairs.until(lambda: first.finish)
        with recorder.recording_below("hand-over", HANDOVER_ROOTS):
            with recorder.recording_steps("prefill step"):
                answer = pair.send("second", prompt(3), sampling)
                await pairs.until(lambda: answer.tokens)
            await pairs.until(lambda: len(answer.tokens) > 1)
        await pairs.until(lambda: len(answer.tokens) > STEADY_TOKENS)
        with recorder.recording_steps("decode step"):
            await pairs.until(lambda: len(answer.tokens) > OBSERVED_TOKENS)
        await pairs.until(lambda: answer.finish)


def trace_placement(recorder: Recorder) -> None:
    """Records the placement of a few requests on two simulated workers."""
    from tandem.protocol.messages import Role

    stages: Any = importlib.import_module("tests.unit.capacity.simulation.stages")
    cluster = stages.cluster(stages.Mode.ADAPTIVE, [Role.BOTH, Role.BOTH])
    with recorder.recording_below("placement and admission", PLACEMENT_ROOTS):
        cluster.run([stages.request(0.01 * number, 400, 20, key=number) for number in range(20)])


def main() -> None:
    """Traces the tree in the working directory, and prints the files by name."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder, recorder.installed():
        asyncio.run(trace_workers(recorder, Path(folder)))
        if speculation("ngram"):
            asyncio.run(trace_drafts(recorder))
        trace_placement(recorder)
    found = {name: recorder.typical_step(name) for name in recorder.steps}
    found |= {name: sorted(files) for name, files in recorder.below.items()}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
