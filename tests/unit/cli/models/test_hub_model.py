"""Models by name: downloads from a local server with the Hub's endpoints, each in a process with its environment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.cli.models.hub_model import HubModel, hub_model
from tandem.engine.weights.checkpoint import check_model
from tandem.engine.weights.gguf_parts import gguf_files
from tandem.protocol.errors import ModelError
from tests.unit.cli.models.hub_server import COMMIT, TOKEN, HubServer, hub_environment
from tests.unit.deploy.test_errors_page import found as listed

SCRIPT = """
import json, sys
from pathlib import Path
from tandem.cli.models.hub_model import hub_model
from tandem.protocol.errors import ModelError
said = []
try:
    path = hub_model(Path(sys.argv[1])).download(lambda *report: said.append(report))
    print(json.dumps({"path": str(path), "said": said}))
except ModelError as error:
    print(json.dumps({"error": error.message}))
"""


def download(hub: HubServer, home: Path, model: str, **variables: str) -> dict[str, str]:
    """Downloads in a process of its own, because the library reads the environment once; returns path or error."""
    env = hub_environment(hub, home) | variables
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, model], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, str] = json.loads(run.stdout)
    return result


def test_only_the_needed_files_are_downloaded_and_later_starts_need_no_network(hub: HubServer, tmp_path: Path) -> None:
    result = download(hub, tmp_path, "org/tiny@v1")
    folder = Path(result["path"])
    check_model(folder)
    files = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "additional_chat_templates/rag.jinja"} <= files
    assert not {"README.md", "consolidated.safetensors", "onnx/config.json"} & files
    assert result["said"][-1][1] == 1.0
    hub.requests.clear()
    assert download(hub, tmp_path, "org/tiny@v1")["path"] == str(folder)
    assert not hub.fetched()
    hub.requests.clear()
    assert download(hub, tmp_path, "org/tiny@v1", HF_HUB_OFFLINE="1")["path"] == str(folder)
    assert download(hub, tmp_path, f"org/tiny@{COMMIT}", HF_HUB_OFFLINE="1")["path"] == str(folder)
    assert not hub.requests
    assert download(hub, tmp_path, "org/tiny@v1", HF_ENDPOINT="http://127.0.0.1:9")["path"] == str(folder)


def test_one_gguf_file_is_downloaded_if_it_is_named(hub: HubServer, tmp_path: Path) -> None:
    assert Path(download(hub, tmp_path, "org/quants:a-Q4.gguf")["path"]).read_bytes() == b"GGUFa-Q4.gguf"
    assert Path(download(hub, tmp_path, "org/quants@v1:sub/a-Q8.gguf")["path"]).read_bytes() == b"GGUFsub/a-Q8.gguf"
    assert hub.fetched() == {"a-Q4.gguf", "a-Q8.gguf"}


def test_all_parts_are_downloaded_if_the_first_is_named(hub: HubServer, tmp_path: Path) -> None:
    model = "org/quants:sub/b-00001-of-00002.gguf"
    path = Path(download(hub, tmp_path, model)["path"])
    assert [file.name for file in gguf_files(path)] == ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"]
    assert hub.fetched() == {"b-00001-of-00002.gguf", "b-00002-of-00002.gguf"}
    path.with_name("b-00002-of-00002.gguf").unlink()
    assert "HF_HUB_OFFLINE is set, and the cache" in download(hub, tmp_path, model, HF_HUB_OFFLINE="1")["error"]


@pytest.mark.parametrize(
    ("model", "variables", "problem"),
    [
        ("org/missing", {}, "neither a folder or file here nor a public repository"),
        ("org/tiny@v9", {}, "no revision v9"),
        ("gated/tiny", {}, "is gated; accept its conditions"),
        ("gated/tiny", {"HF_TOKEN": "hf_wrong"}, "does not accept the token; correct HF_TOKEN"),
        ("org/tiny", {"HF_TOKEN": "hf_wrong"}, "does not accept the token; correct HF_TOKEN"),
        ("private/tiny", {}, "set HF_TOKEN to a token that may read this repository"),
        ("limited/tiny", {}, "try again later, or set HF_TOKEN for a higher limit"),
        ("org/tiny", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ("org/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "check the connection and HF_ENDPOINT"),
        (
            "org/quants",
            {},
            "has no safetensors; give one of its GGUF files: org/quants:a-Q4.gguf, org/quants:c-00001-of-00002.gguf,"
            " org/quants:sub/a-Q8.gguf, org/quants:sub/b-00001-of-00002.gguf.",
        ),
        ("org/quants:c-00001-of-00002.gguf", {}, "org/quants lacks c-00002-of-00002.gguf, a part of this model"),
        ("org/quants:a-Q9.gguf", {}, "has no file a-Q9.gguf; give one of"),
        ("org/pickled", {}, "has no safetensors and no GGUF file"),
    ],
)
def test_what_cannot_be_downloaded_is_one_sentence(
    hub: HubServer, tmp_path: Path, model: str, variables: dict[str, str], problem: str
) -> None:
    error = download(hub, tmp_path, model, **variables)["error"]
    assert problem in error
    assert error.startswith(model.partition("@")[0].partition(":")[0])
    assert "\n" not in error
    assert listed(error), f"not on the page of errors: {error}"
    assert not hub.fetched()


def test_a_token_opens_a_gated_repository(hub: HubServer, tmp_path: Path) -> None:
    check_model(Path(download(hub, tmp_path, "gated/tiny", HF_TOKEN=TOKEN)["path"]))


def test_a_disk_without_space_is_known_before_the_download(hub: HubServer, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 1 << 60
    assert "GiB are to be downloaded, and the disk of" in download(hub, tmp_path, "org/tiny")["error"]
    assert not hub.fetched()


def test_another_part_than_the_first_is_refused_before_a_download() -> None:
    with pytest.raises(ModelError, match=r"name that instead, org/quants:b-00001-of-00002\.gguf"):
        HubModel("org/quants", "v1", "b-00002-of-00002.gguf").download(lambda *_: None)


def test_folders_and_files_take_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_model(Path("org/tiny")) == HubModel("org/tiny")
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert hub_model(Path("org/tiny")) is None


def test_the_forms_of_ids() -> None:
    assert hub_model(Path("a-b/C.d_e@refs/pr/1:x/y.gguf")) == HubModel("a-b/C.d_e", "refs/pr/1", "x/y.gguf")
    assert [HubModel("a/b").name, HubModel("a/b", "v1", "c.gguf").name] == ["a/b", "a/b:c.gguf"]
    for local in ("/a/b", "../a", "~/a", "a", "a/b/c", "a/b.gguf", "a/b:c.bin"):
        assert hub_model(Path(local)) is None, local
