"""Folders that llmcompressor and GPTQModel write load to the values that these themselves dequantize them to.

Each runs in a virtual environment of its own: `.ci/client_environments FOLDER llmcompressor gptqmodel` makes them, in
TANDEM_CLIENT_ENVIRONMENTS or the user's cache. A test whose environment is missing is skipped.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.factories import write_tiny_model
from tests.unit.engine.weights.test_quantized import loaded

HERE = Path(__file__).parent
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
ENVIRONMENTS = Path(os.environ.get("TANDEM_CLIENT_ENVIRONMENTS") or _CACHE / "tandem" / "clients")
_SECONDS = 280.0
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
"""Multiples of 128, which are the tools' groups and blocks."""


def quantized(tool: str, folder: Path, *arguments: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the weights of a tiny model that `tool` has quantized: as loaded, and as it dequantizes them itself."""
    python = ENVIRONMENTS / tool / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{tool} is not installed in {ENVIRONMENTS}: .ci/client_environments installs it")
    source, written = write_tiny_model(folder / "source", **SIZES), folder / "quantized"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, HERE / f"{tool}_folder.py", source, written, *arguments],
        cwd=folder,
        env=environment | {"GPTQMODEL_CPU_WORKERS": "2"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return loaded(written), load_file(written / "values.dequantized")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("scheme", "method"),
    [
        ("W4A16", "rtn"),
        ("W4A16", "gptq-static"),
        ("W4A16", "gptq-weight"),
        ("W4A16_ASYM", "rtn"),
        ("W8A16", "rtn"),
        ("W8A8", "gptq-static"),
        ("FP8", "rtn"),
        ("FP8_DYNAMIC", "rtn"),
        ("FP8_BLOCK", "rtn"),
    ],
)
def test_llmcompressor(scheme: str, method: str, tmp_path: Path) -> None:
    actual, wanted = quantized("llmcompressor", tmp_path, scheme, method)
    assert actual.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(actual[name], weight, atol=1e-7, rtol=1e-6)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", ["gptq", "gptq-sorted", "gptq-asym", "gptq_v2"])
def test_gptqmodel(scheme: str, tmp_path: Path) -> None:
    """It rounds scales and values to bfloat16; codes of 4 bits are 6 % of the largest value apart."""
    actual, wanted = quantized("gptqmodel", tmp_path, scheme)
    assert len(wanted) == 7 * SIZES["num_hidden_layers"]
    for name, weight in wanted.items():
        torch.testing.assert_close(actual[name], weight, atol=1e-6, rtol=2**-7)
