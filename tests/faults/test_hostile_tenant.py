"""All attacks of `python -m tests.hostile`, without a bound of the gaps: time does not decide a test."""

import subprocess
import sys

import pytest

from tests.soak import soak


@soak
@pytest.mark.timeout(1800)
def test_no_attack_fails_an_answer_ends_a_process_or_keeps_memory() -> None:
    command = [sys.executable, "-m", "tests.hostile", "--max-gap", "inf"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
