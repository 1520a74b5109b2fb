"""The house itself: each room is imported from this repository, and generated code matches its schemas."""

import importlib
from pathlib import Path

import pytest

from wire.generate import OUT, ROOT, generate

ROOMS = [
    "wire",
    "telemetry",
    "costs",
    "planner",
    "router",
    "worker",
    "prefill_worker",
    "decode_worker",
    "kv_transfer",
    "engine",
    "cluster",
    "simulation",
    "cli",
    "benchmarks",
    "deploy",
]


@pytest.mark.parametrize("room", ROOMS)
def test_room_lies_in_this_repository(room: str) -> None:
    file = importlib.import_module(room).__file__
    assert file is not None, f"{room}/ has no __init__.py"
    assert Path(file).resolve().parent == ROOT / room


def test_generated_code_matches_the_schemas(tmp_path: Path) -> None:
    fresh = {path.relative_to(tmp_path): path.read_text() for path in generate(tmp_path)}
    committed = {path.relative_to(OUT): path.read_text() for path in OUT.rglob("*_pb2*.py*") if path.suffix != ".pyc"}
    assert fresh.keys() == committed.keys(), "run `make proto`"
    stale = [str(path) for path, text in fresh.items() if committed[path] != text]
    assert not stale, "run `make proto`"
