"""The documentation: links, headings and paths exist, every page is in the site, and the site can be built."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from deploy.diagrams import FOLDER, mark_of
from deploy.docs_site import linked_files, with_links_on_site
from tandem.cli.main import app
from tests.browser import needs_browser, sound_page
from tests.unit.deploy.chart import ROOT

DOCS = ROOT / "docs"
OTHERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "examples/README.md")
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in OTHERS)])
PATH = re.compile(r"`(\w+/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in words]
    return {variant for anchor in plain for variant in (anchor, re.sub(r"-+", "-", anchor))}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link} names no heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_path_in_code_quotes_is_in_the_repository(page: Path) -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = {path for path in PATH.findall(page.read_text()) if path.partition("/")[0] in folders}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_links_to_files_of_the_repository_lead_to_their_pages(tmp_path: Path) -> None:
    (tmp_path / "docs" / "guides").mkdir(parents=True)
    (tmp_path / "proto").mkdir()
    (tmp_path / "docs" / "models.md").touch()
    (tmp_path / "a.py").touch()
    (tmp_path / "README.md").write_text("[m](docs/models.md), [p](proto), [lost](nowhere.py)")
    text = "[a](../../a.py#L3), [b](../models.md#b), [c](https://c.org/x), [r](../../README.md#use)"
    (tmp_path / "docs" / "guides" / "one_gpu.md").write_text(text)
    assert linked_files(tmp_path, ["docs/guides/one_gpu.md"]) == {
        "a.py": "repository/a.py.md",
        "README.md": "repository/README.md",
        "proto": "repository/proto/files.md",
    }
    made = "[a](../repository/a.py.md), [b](../models.md#b), [c](https://c.org/x), [r](../repository/README.md#use)"
    assert with_links_on_site(text, "docs/guides/one_gpu.md", "guides/one_gpu.md", tmp_path) == made
    readme = (tmp_path / "README.md").read_text()
    made = "[m](../models.md), [p](proto/files.md), [lost](nowhere.py.md)"
    assert with_links_on_site(readme, "README.md", "repository/README.md", tmp_path) == made


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.mmd")), ids=lambda file: file.stem)
def test_each_diagram_is_drawn_from_its_source(file: Path) -> None:
    drawn = file.with_suffix(".svg").read_text(encoding="utf-8")
    assert drawn.endswith(mark_of(file.read_text(encoding="utf-8"))), "run `python -m deploy.diagrams`"
    assert not re.search(r"<script|<foreignObject|https?://(?!www\.w3\.org/)", drawn), "it needs nothing else"


def test_every_page_is_in_the_navigation() -> None:
    text = re.sub(r"!!python/\S+|!ENV", "", (ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/]+\.md", str(yaml.safe_load(text)["nav"])))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed == {page for page in there if not page.startswith("decisions/")}


def test_every_decision_is_in_the_index() -> None:
    listed = re.findall(r"^\| \[[^\]]+\]\((\w+\.md)\)", (DOCS / "decisions" / "README.md").read_text(), re.MULTILINE)
    assert set(listed) == {path.name for path in (DOCS / "decisions").glob("*.md")} - {"README.md"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the site, which fails for a link that leads nowhere."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_has_all_pages_and_the_files_that_they_link_to(site: Path) -> None:
    for page in ("quick_start", "faq", "errors", "cli", "settings", "guides/which_model", "operations/troubleshooting"):
        assert (site / f"{page}.html").is_file(), page
    source = (site / "repository" / "proto" / "tandem" / "v1" / "inference.proto.html").read_text(encoding="utf-8")
    assert "rpc Generate(GenerateRequest)" in source
    first = re.findall(r"^ {2}- (\S.*?):?$", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2], re.MULTILINE)
    assert "Decisions" not in first
    assert "decisions/index.html" in (site / "architecture.html").read_text(encoding="utf-8")


@needs_browser
@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed")
async def test_the_site_needs_no_network(site: Path) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        async with sound_page() as page:
            await page.goto(f"http://127.0.0.1:{server.server_port}/architecture.html")
            diagram = page.locator("img[src='diagrams/architecture.svg']")
            assert await diagram.evaluate("image => image.decode().then(() => image.naturalWidth)") > 0
            await page.locator("input[name=query]").press_sequentially('"the most this router queues"')
            await page.wait_for_selector(".md-search-result__item a[href*='errors.html#resource_exhausted']")
        server.shutdown()


def option_table() -> list[tuple[str, str]]:
    """Returns the cells for vLLM and Tandem of the page's table of options."""
    page = (DOCS / "guides" / "coming_from_vllm.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \| [^|]*\|$", page, re.MULTILINE)
    return [(theirs, ours) for theirs, ours in rows]


def test_the_options_that_guides_name_are_options() -> None:
    commands: Any = get_command(app)
    known = {option for command in commands.commands.values() for param in command.params for option in param.opts}
    known |= {
        option for command in commands.commands.values() for param in command.params for option in param.secondary_opts
    }
    assert len(option_table()) > 15
    for theirs, ours in option_table():
        for option in re.findall(r"--[a-z][a-z-]+", ours):
            assert option in known, f"{theirs} has {option}"
    for guide in (DOCS / "guides").glob("*.md"):
        for line in re.findall(r"^ *tandem .*$", guide.read_text(), re.MULTILINE):
            name, *rest = line.split("#")[0].split()[1:]
            command = commands.commands[name]
            spelled = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
            assert {word for word in rest if word.startswith("--")} <= spelled, line


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_docs_builds_it() -> None:
    done = subprocess.run(["make", "-n", "docs"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "mkdocs build" in done.stdout
