"""docs/security.md names an existing test for each class of attack, and no code executes data from outside."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.engine.weights.checkpoint import stored_dtype
from tandem.protocol.errors import ModelError
from tandem.protocol.generate import ROOT
from tandem.protocol.page_digests import DIGEST_BYTES, page_digests, root_digest
from tests.unit.test_house import PACKAGES

PAGE = (ROOT / "docs" / "security.md").read_text()
ATTACKS = PAGE.partition("## Known attacks")[2]
ROWS = [line.split("|")[1:-1] for line in ATTACKS.splitlines() if line.startswith("| ") and "---" not in line][1:]
CLASSES = (
    "pickle on a socket",
    "client-made KV transfer parameters",
    "one request kills the engine",
    "cost attacks",
    "cache timing and weak hashes",
    "open admin and Ray ports",
    "writes into a worker's memory",
)
RUNS_CODE = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
TO_ITS_OWN_CHILD = "tandem/engine/kernels/compile_apart.py"
"""The module that pickles through a pipe to a process that it starts itself."""


def test_each_class_of_attack_has_a_row() -> None:
    named = [row[0].strip() for row in ROWS]
    assert [wanted for wanted in CLASSES if not any(name.startswith(wanted) for name in named)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_the_tests_of_a_row_are_there(row: list[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[-1])
    assert named, "it names no test"
    for file, test in named:
        source = ast.parse((ROOT / file).read_text())
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert test in {node.name for node in ast.walk(source) if isinstance(node, functions)}, f"{file}::{test}"


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())


def what_runs_code(tree: ast.Module) -> Iterator[str]:
    """Yields imports and calls by which bytes or text from outside could become code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] in RUNS_CODE)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in RUNS_CODE:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"eval", "exec", "torch.load", "yaml.load", "numpy.load", "np.load"}:
                yield called
            yield from (word.arg for word in node.keywords if word.arg in {"trust_remote_code", "allow_pickle"})


def test_nothing_unpickles_or_evaluates() -> None:
    modules_of = {file: list(what_runs_code(tree)) for file, tree in sources()}
    assert len(modules_of) > 500, "the packages are looked at"
    assert {file: names for file, names in modules_of.items() if names} == {TO_ITS_OWN_CHILD: ["pickle"]}


def test_what_would_is_seen() -> None:
    code = (
        "import pickle\nfrom dill import loads\neval('1')\ntorch.load(f)\nload(m, trust_remote_code=True)\nmodel.eval()"
    )
    assert sorted(what_runs_code(ast.parse(code))) == ["dill", "eval", "pickle", "torch.load", "trust_remote_code"]


def test_weights_that_are_pickled_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="only safetensors weights are read"):
        stored_dtype(tmp_path)


def test_names_of_pages_are_of_a_strong_hash() -> None:
    """Page names are 128 bits of BLAKE2b: flipping any bit of a token changes its page's name and all later ones."""
    assert DIGEST_BYTES >= 16
    tokens = list(range(64))
    names = page_digests(tokens, 16, root_digest("salt"))
    assert {len(name) for name in names} == {DIGEST_BYTES}
    for place in range(64):
        changed = [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]]
        others = page_digests(changed, 16, root_digest("salt"))
        assert [ours == theirs for ours, theirs in zip(names, others, strict=True)] == [
            page < place // 16 for page in range(4)
        ]
