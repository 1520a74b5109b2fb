"""A full log is rotated to another file: no line is lost or cut, even with several writers."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tandem.cli.observe.logs import LogTail
from tandem.logging.log_file import KEPT, earlier

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 4096
LINES = 400
SCRIPT = """
import logging, os, pathlib, sys, threading
from tandem.logging.logs import LogConfig, begin_log

file, limit, lines, name = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
begin_log(LogConfig(file, max_bytes=limit), name)
log = logging.getLogger("x")

def native():
    for number in range(lines):
        os.write(1 + number % 2, b"%s native %d\\n" % (name.encode(), number))

writing = threading.Thread(target=native)
writing.start()
for number in range(lines):
    log.info("%s logged %d.", name, number)
    if len(sys.argv) > 5:
        sys.stdout.write("said\\n")  # which print does in two steps where it is not buffered
        os.write(int(sys.argv[5]), b".")  # whoever follows has read so far before the next line
        os.read(int(sys.argv[6]), 1)
writing.join()
log.info("%s is over", name)
"""


def start(*arguments: object, **how: object) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *map(str, arguments)], cwd=ROOT, **how)  # type: ignore[call-overload, no-any-return]


def files(log: Path) -> list[Path]:
    return [file for file in (*(earlier(log, number) for number in range(KEPT + 1, 0, -1)), log) if file.exists()]


def expected(name: str, lines: int) -> Counter[str]:
    return Counter(line for index in range(lines) for line in (f"{name} native {index}", f"x: {name} logged {index}."))


def without_time(line: str) -> str:
    return line[line.index("x: ") :] if " INFO " in line else line


def test_a_full_log_goes_on_in_another_file(tmp_path: Path) -> None:
    log = tmp_path / "run" / "decode-0.log"
    assert start(log, LIMIT, LINES, "a").wait() == 0
    kept = files(log)
    assert len(kept) == KEPT + 1
    for file in kept[:-1]:
        assert LIMIT <= file.stat().st_size < 2 * LIMIT + 64 * LINES
    assert {file.name for file in log.parent.iterdir()} == {file.name for file in kept}
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in kept)
    assert log.read_text().endswith("a is over\n") or "a is over\n" in earlier(log, 1).read_text()


def test_no_line_of_several_processes_is_lost_or_cut(tmp_path: Path) -> None:
    """The size limit is large enough to keep everything."""
    log = tmp_path / "run" / "router.log"
    limit = 2 * 2 * LINES * 40 // 3
    writers = [start(log, limit, LINES, name) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    kept = files(log)
    assert 1 < len(kept) <= KEPT
    counts = Counter(without_time(line) for file in kept for line in file.read_text().splitlines())
    assert counts - Counter({"x: a is over": 1, "x: b is over": 1}) == expected("a", LINES) + expected("b", LINES)


def test_who_follows_reads_each_line_once_however_often_files_turn(tmp_path: Path) -> None:
    log = tmp_path / "run" / "decode-0.log"
    (wrote, writes), (reads, read) = os.pipe(), os.pipe()
    writer = start(log, LIMIT, LINES, "a", writes, reads, pass_fds=(writes, reads))
    os.close(writes)
    os.close(reads)
    tail, counts = LogTail(tmp_path), Counter[str]()
    while os.read(wrote, 1):
        counts.update(map(without_time, tail.lines()))
        os.write(read, b".")
    assert writer.wait() == 0
    counts.update(map(without_time, tail.lines()))
    for descriptor in (wrote, read):
        os.close(descriptor)
    assert counts - expected("a", LINES) == {"said": LINES, "x: a is over": 1}
    assert not expected("a", LINES) - counts
    counts.pop("said")
    counts.pop("x: a is over")
    assert counts == expected("a", LINES)
