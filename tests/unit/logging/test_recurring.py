"""A recurring error is logged once with its traceback, and then from time to time with its count."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tandem.logging.logs import about
from tandem.logging.recurring import MOST_KINDS, RECURRING, RecurringErrors

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import logging, pathlib, sys
from tandem.logging.logs import LogConfig, begin_log
begin_log(LogConfig(pathlib.Path(sys.argv[1])))
log = logging.getLogger("kv_transfer.nixl_backend.transport")
for _ in range(2000):
    try:
        raise RuntimeError("the device is lost")
    except RuntimeError:
        log.exception("the transfer thread goes on after an error")
log.info("over")
"""


class Said:
    """A logger's records as they are written under a manual clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.errors = RecurringErrors(clock=lambda: self.now)
        self.lines: list[logging.LogRecord] = []

    def fails(self, message: str, *values: object, of: Exception | None = None, **extra: object) -> None:
        try:
            raise of or ValueError("why")
        except Exception:
            self.takes(message, *values, exc_info=sys.exc_info(), **extra)

    def takes(self, message: str, *values: object, exc_info: object = None, **extra: object) -> None:
        record = logging.LogRecord("router.walk", logging.ERROR, "walk.py", 1, message, values, exc_info)  # type: ignore[arg-type]
        record.__dict__.update(extra)
        line = self.errors.take(record)
        if line is not None:
            self.lines.append(line)

    def take_lines(self) -> list[tuple[str, bool]]:
        """Returns each new line, and True if it has a traceback."""
        new, self.lines = self.lines, []
        return [(line.getMessage(), line.exc_info is not None) for line in new]


def test_a_process_writes_one_traceback_and_one_count_of_two_thousand(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "log")], check=True, cwd=ROOT)
    text = (tmp_path / "log").read_text()
    assert text.count("Traceback") == 1
    first, *_, over, count = text.splitlines()
    assert first.endswith("the transfer thread goes on after an error")
    assert over.endswith("over")
    assert "goes on after an error (RuntimeError) (1999 more like it in the last " in count


def test_it_is_said_again_after_a_while_with_the_count() -> None:
    said = Said()
    for second in range(150):
        said.now = second
        said.fails("a step of %d failed", second)
    assert said.take_lines() == [
        ("a step of 0 failed", True),
        ("a step of 60 failed (59 more like it in the last 60 s)", True),
        ("a step of 120 failed (59 more like it in the last 60 s)", True),
    ]


def test_the_count_is_said_of_an_error_that_has_gone() -> None:
    said = Said()
    for _ in range(3):
        said.fails("a step failed")
    assert said.take_lines() == [("a step failed", True)]
    said.now = 59
    assert said.errors.due() == []
    said.now = 60
    (line,) = said.errors.due()
    assert (line.getMessage(), line.exc_info) == ("a step failed (ValueError) (2 more like it in the last 60 s)", None)
    said.fails("a step failed")
    assert said.take_lines() == [("a step failed", True)]
    assert said.errors.due(all_of_them=True) == []


def test_other_errors_are_said() -> None:
    def elsewhere(fails: Callable[[], object]) -> None:
        fails()

    said = Said()
    said.fails("%s failed", "decode-0")
    said.fails("%s failed", "decode-1")
    said.fails("%s failed", "decode-0", of=KeyError("x"))
    try:
        elsewhere(lambda: int("x"))
    except ValueError:
        said.takes("%s failed", "decode-0", exc_info=sys.exc_info())
    assert len(said.take_lines()) == 4
    for _ in range(2):
        said.takes("no error, no mark")
    assert len(said.take_lines()) == 2


def test_a_marked_line_without_a_traceback_is_counted_too() -> None:
    said = Said()
    for _ in range(3):
        said.takes("%s refuses this router's token", "the controller", **RECURRING)
    assert said.take_lines() == [("the controller refuses this router's token", False)]
    assert said.errors.due(all_of_them=True)[0].getMessage().endswith("token (2 more like it in the last 0 s)")


def test_each_request_has_its_line_and_one_of_them_the_traceback() -> None:
    said = Said()
    for name in "abc":
        said.fails("request %s met a defect", name, **about(name))
    assert said.take_lines() == [
        ("request a met a defect", True),
        ("request b met a defect (ValueError)", False),
        ("request c met a defect (ValueError)", False),
    ]


def test_no_variety_of_names_takes_memory_without_end() -> None:
    said = Said()
    for number in range(10 * MOST_KINDS):
        said.fails("%s failed", f"name-{number}")
    assert len(said.take_lines()) == MOST_KINDS + 1
