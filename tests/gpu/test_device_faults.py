"""A real fault of the device, in a separate process: typed errors, no hang, and an exit that a supervisor sees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.factories import FAMILIES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ROOT = Path(__file__).parent.parent.parent
WITHIN_S = 180.0
"""The limit in seconds, which includes the start of a worker that compiles kernels."""


@pytest.mark.parametrize(
    ("fault", "words"), [("out-of-range", "CUDA error"), ("never-ends", "a step did not end within 5 s")]
)
def test_a_fault_of_the_device_ends_in_words(fault: str, words: str, tmp_path: Path) -> None:
    config = FAMILIES["llama3"] | {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.faulty_worker", str(tmp_path), fault],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=True,
    )
    reply = json.loads(done.stdout.splitlines()[-1])
    assert reply["code"] == "INTERNAL"
    assert "worker w failed in a step" in reply["message"]
    assert words in reply["message"]
    assert words in reply["ended"]
