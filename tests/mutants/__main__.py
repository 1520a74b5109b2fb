"""Changes the product in small ways that break promises, and runs the tests that must notice: `make mutants`.

Each mutant is applied to a copy of the repository, whose chosen tests then run until the first of them fails. The exit
code is 1 if less than 90 % of the mutants were caught.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import answers, limits, pages, transfers
from tests.mutants.mutant import ROOT, Mutant

MUTANTS = (*transfers.MUTANTS, *pages.MUTANTS, *answers.MUTANTS, *limits.MUTANTS)
CAUGHT_SHARE_MIN = 0.9
_TIMEOUT_S = 900.0
_PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:benchmark")
_FAILED, _PASSED = 1, 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the tests noticed a mutant, in how many seconds, and the test that failed."""

    mutant: Mutant
    caught: bool
    seconds: float
    by: str = ""


def copy_repository(folder: Path) -> Path:
    """Copies the tracked and new files of the repository, without its history."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if not name.startswith(("docs/", "benchmarks/results/")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run_tests(copy: Path, tests: tuple[str, ...]) -> tuple[bool | None, str]:
    """Runs the tests in a copy; returns whether all passed, and the first that failed. None = they did not run."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *_PYTEST, *tests]
    try:
        ran = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {_TIMEOUT_S:g} s"
    failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ran.returncode not in (_PASSED, _FAILED):
        return None, ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.returncode == _PASSED, failed[0] if failed else ""


def judge(mutant: Mutant, copy: Path) -> Verdict:
    """Applies a mutant to a copy, runs its tests, and restores the copy."""
    file = copy / mutant.file
    source = file.read_text(encoding="utf-8")
    file.write_text(mutant.mutated(source), encoding="utf-8")
    began_s = time.monotonic()
    try:
        passed, by = run_tests(copy, mutant.tests)
    finally:
        file.write_text(source, encoding="utf-8")
    # A module that can no longer be imported is not a mutant that tests have caught.
    if passed is None:
        raise RuntimeError(f"the tests of {mutant.promise!r} did not run: {by}")
    return Verdict(mutant, not passed, time.monotonic() - began_s, by)


def run(mutants: list[Mutant], processes: int) -> list[Verdict]:
    """Judges the mutants, `processes` at a time, each in a copy of its own; prints each verdict."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(processes):
            copies.put(copy_repository(Path(folder) / str(number)))

        def one(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                verdict = judge(mutant, copy)
            finally:
                copies.put(copy)
            print(
                f"{'caught' if verdict.caught else 'SURVIVED':<9}{verdict.seconds:>5.0f} s  {mutant.promise}",
                flush=True,
            )
            return verdict

        return list(pool.map(one, mutants))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--processes", type=int, default=2, help="mutants that are tested at once")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose promise or file contains this")
    parser.add_argument("--json", type=Path, help="file for the verdicts")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.promise or options.only in mutant.file]
    if not chosen:
        parser.error(f"no mutant has {options.only!r} in its promise or file")
    verdicts = run(chosen, options.processes)
    survivors = [verdict.mutant for verdict in verdicts if not verdict.caught]
    for mutant in survivors:
        print(f"survived: {mutant.promise} ({mutant.file})")
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} mutants were caught")
    if options.json is not None:
        rows = [{"promise": v.mutant.promise, "file": v.mutant.file, "caught": v.caught, "by": v.by} for v in verdicts]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(len(survivors) > (1 - CAUGHT_SHARE_MIN) * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
