"""The documentation: links, headings and paths exist, every page is in the site, and the site can be built."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from typer.main import get_command

from deploy.docs_site import without_outer_links
from tandem.cli.main import app
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


def test_links_to_sources_become_paths_in_the_site() -> None:
    page = PurePosixPath("guides/one_gpu.md")
    text = "[a](../../engine/a.py#L3), [`proto/d`](../../proto/d), [b](../models.md#b), [c](https://c.org/x)"
    text += ", [e](../decisions/)"
    made = "a (`engine/a.py`), `proto/d`, [b](../models.md#b), [c](https://c.org/x), e"
    assert without_outer_links(text, page) == made


def test_every_page_is_in_the_navigation() -> None:
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/]+\.md", str(yaml.safe_load(text)["nav"])))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed == {page for page in there if not page.startswith("decisions/")}


def test_every_decision_is_in_the_index() -> None:
    listed = re.findall(r"^\| \[[^\]]+\]\((\w+\.md)\)", (DOCS / "decisions" / "README.md").read_text(), re.MULTILINE)
    assert set(listed) == {path.name for path in (DOCS / "decisions").glob("*.md")} - {"README.md"}


@pytest.mark.skipif(find_spec("material") is None, reason="mkdocs-material is not installed")
def test_the_site_is_built(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "guides" / "one_gpu.html").is_file()


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
