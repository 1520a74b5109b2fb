"""Every process of the cluster writes into its file, native output too."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import logging, os, pathlib, sys
from wire.logs import begin_log
begin_log(pathlib.Path(sys.argv[1]) if sys.argv[1:] else None)
logging.getLogger("router.server").info("serves")
os.write(2, b"a native word\\n")
print("a print", flush=True)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[3]
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True, cwd=root
    )


def test_two_incarnations_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "not there yet" / "decode-0.log"
    for _ in range(2):
        done = run(str(file))
        assert done.stdout == done.stderr == ""
    text = file.read_text()
    for line in (" INFO router.server: serves\n", "a native word\n", "a print\n"):
        assert text.count(line) == 2
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_without_a_file_the_log_goes_to_stderr() -> None:
    done = run()
    assert done.stderr.splitlines()[0].endswith(" INFO router.server: serves")
    assert done.stdout == "a print\n"
