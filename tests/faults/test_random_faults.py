"""`python -m tests.faults`: no answer is wrong or without an end, and no page stays taken.

How many requests end with an error depends on the machine: while the only decode worker has too many pages in
quarantine, or a role has no worker that is known to come back, requests are refused (docs/reliability.md has figures).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import soak


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("cluster", "minutes"),
    [
        ("smollm2", 1),
        pytest.param("smollm2", 10, marks=soak),
        pytest.param("hybrid", 2, marks=soak),
        pytest.param("ranks", 2, marks=soak),
    ],
)
def test_requests_of_every_form_survive_random_faults(cluster: str, minutes: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults", "--seed", "41", "--out", str(tmp_path)]
    command += ["--cluster", cluster, "--minutes", str(minutes), "--workers", "1", "--min-saved", "0"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
