"""Prints the amount of code to read, by path through the code.

The figures are files and lines of a decode step, a prefill step, a hand-over and placement, the tuned constants of
placement, the largest flat folders, and the share of docstrings that begin as fragments.

    python -m benchmarks.reading [--tree PATH] [--json] [--files]
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.reading import source

TRACE = Path(__file__).with_name("trace.py")
TIMEOUT_S = 600
PLACEMENT = "placement and admission"
LARGEST = 8
"""The number of largest folders to name."""


def trace(tree: Path) -> dict[str, list[str]]:
    """Returns the files that run in each traced path of a tree. SystemExit with a message if the tree cannot run."""
    environment = os.environ | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", str(TRACE)]
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{tree} could not be traced: {done.stderr.strip()[-2000:]}")
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(tree: Path, paths: dict[str, list[str]]) -> dict[str, Any]:
    """All figures of a tree whose traced `paths` are given."""
    files = source.python_files(tree)
    texts = [text for path in files for text in source.docstrings(path)]
    fragments = sum(map(source.is_fragment, texts))
    constants = [name for file in paths[PLACEMENT] for name in source.number_constants(tree / file)]
    return {
        "paths": {
            name: {"files": len(some), "lines": sum(source.lines(tree / file) for file in some), "names": some}
            for name, some in paths.items()
        },
        "placement_constants": constants,
        "largest_folders": dict(source.flat_folders(files, tree).most_common(LARGEST)),
        "docstrings": len(texts),
        "fragment_share": round(fragments / max(1, len(texts)), 4),
    }


def as_text(figures: dict[str, Any], *, files: bool) -> str:
    """The figures as lines of text; with `files`, also the files of each path."""
    said = []
    for name, path in figures["paths"].items():
        said.append(f"{name}: {path['files']} files, {path['lines']} lines")
        said += [f"    {file}" for file in path["names"] if files]
    said.append(f"constants of {PLACEMENT}: {len(figures['placement_constants'])}")
    folders = ", ".join(f"{folder}/ {count}" for folder, count in figures["largest_folders"].items())
    said.append(f"largest folders: {folders}")
    said.append(f"docstrings that begin as fragments: {figures['fragment_share']:.1%} of {figures['docstrings']}")
    return "\n".join(said)


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reading", description=__doc__.splitlines()[0])
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--tree", type=Path, default=here, help="another checkout (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--files", action="store_true", help="name the files of each path")
    asked = parser.parse_args(arguments)
    tree = asked.tree.resolve()
    if not (tree / "worker" / "loop.py").is_file():
        raise SystemExit(f"{tree} is not a checkout of this repository: it has no tandem/worker/loop.py")
    figures = measure(tree, trace(tree))
    print(json.dumps(figures, indent=1) if asked.json else as_text(figures, files=asked.files))


if __name__ == "__main__":
    main()
