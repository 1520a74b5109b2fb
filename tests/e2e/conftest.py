"""Prompts of real English text, and the reference answers of transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.reference import Reference

PROMPT_LENGTHS = (
    5,
    7,
    15,
    16,
    17,
    23,
    31,
    33,
    48,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
    200,
    255,
    300,
    511,
    513,
    700,
    1025,
    1500,
)
"""Prompt lengths in tokens around every page and chunk boundary, 24 of them."""

_ROOT = Path(__file__).parents[2]
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
_FOLDER = Path(os.environ.get("TANDEM_CLIENT_ENVIRONMENTS") or _CACHE / "tandem" / "clients")
_INSTALL_S = 1200.0
_RUN_S = 240.0


@pytest.fixture(scope="session")
def prompts(model_folder: Path) -> list[tuple[int, ...]]:
    """Real English prompts of exact token lengths, each from another part of the text."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    text = "\n".join(topics[key] for key in sorted(topics))
    ids = Tokenizer.from_file(str(model_folder / "tokenizer.json")).encode(text[:400_000]).ids
    starts = [1_000 + 2_111 * i for i in range(len(PROMPT_LENGTHS))]
    return [tuple(ids[s : s + n]) for s, n in zip(starts, PROMPT_LENGTHS, strict=True)]


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> Reference:
    """The reference: transformers on the served model."""
    return Reference(model_folder)


@pytest.fixture(scope="session")
def environments() -> Path:
    """The folder of the clients' virtual environments."""
    if os.environ.get("TANDEM_EXTERNAL_CLIENTS") == "1":
        script = [_ROOT / ".ci" / "client_environments", _FOLDER]
        environment = {**os.environ, "PYTHON": sys.executable}
        subprocess.run(script, env=environment, timeout=_INSTALL_S, check=False)
    return _FOLDER


@pytest.fixture
def run(environments: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs a command of a client's environment, without access to a model hub, and returns its output."""

    def run(client: str, *command: str, **variables: str) -> str:
        program = environments / client / "bin" / command[0]
        if not program.exists():
            pytest.skip(f"{client} is not installed in {environments}: .ci/client_environments installs it")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"PWD": str(tmp_path), **variables}  # by which some programs know their working folder
        done = subprocess.run(
            [program, *command[1:]],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_RUN_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run
