"""Fixtures: repositories, and a local server with the Hub's endpoints that serves them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.factories import write_tiny_model
from tests.small_tokenizer import save_tokenizer
from tests.unit.cli.models.hub_server import STATUSES, HubServer, serving


@pytest.fixture(scope="session")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    for name in ("org/tiny", "gated/tiny"):
        folder = root / name
        folder.mkdir(parents=True)
        write_tiny_model(folder)
        save_tokenizer(folder)
        (folder / "README.md").write_text("not needed")
        (folder / "consolidated.safetensors").write_bytes(b"the same weights again")
        (folder / "onnx").mkdir()
        (folder / "onnx" / "config.json").write_text("{}")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    for org in STATUSES:
        (root / org / "tiny").mkdir(parents=True)
    quants = ["a-Q4.gguf", "sub/a-Q8.gguf", "sub/b-00001-of-00002.gguf", "sub/b-00002-of-00002.gguf"]
    quants.append("c-00001-of-00002.gguf")
    for name, files in {"org/quants": quants, "org/pickled": ["pytorch_model.bin"]}.items():
        for file in files:
            (root / name / file).parent.mkdir(parents=True, exist_ok=True)
            (root / name / file).write_bytes(b"GGUF" + file.encode())
    return root


@pytest.fixture
def hub(repositories: Path) -> Iterator[HubServer]:
    with serving(repositories) as server:
        yield server
