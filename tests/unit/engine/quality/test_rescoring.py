"""Rescoring: a prefill of the whole text predicts what its decode steps predicted, with quantization as without.

On the kernels of CPUs, and on the plain ones, which compute also what only GPUs serve.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine import device
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.quality.divergence import DivergenceSum
from tandem.engine.quality.teacher_forced import StepRows
from tandem.engine.steps.batch import StepBatch
from tests.factories import tiny_engine_config, write_tiny_model
from tests.unit.engine.weights.quantized_folders import write_quantized

SAMPLES = [[(37 * sample + 11 * at * at + 5 * at) % 160 for at in range(48)] for sample in range(6)]
PROMPT = 16
SIZES = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
FORMS: dict[str, dict[str, Any]] = {
    "W4": {"quantization": "int4"},
    "W8": {"quantization": "int8"},
    "fp8, inputs too": {"quantization": "fp8"},
    "KV int8": {"kv_cache_dtype": "int8"},
    "KV fp8": {"kv_cache_dtype": "fp8"},
}
CHECKPOINTS = ("W4A16", "W8A8 int")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), **SIZES)


def difference(folder: Path, kernels: Kernels | None, **settings: Any) -> float:
    """Returns the mean KL(prefill ‖ decode) over the positions after the prompts, in bfloat16; kernels None = served.

    The prompts are prefilled anew for the decode steps, which take all samples at once.
    """
    runner = ModelRunner.load(tiny_engine_config(folder, dtype="bfloat16", **settings), kernels=kernels)
    count, length = len(SAMPLES), len(SAMPLES[0])
    rows = StepRows(runner, length, 2 * count)
    whole = [
        runner.logits(StepBatch([rows.row(number, sample, 0)]), every_token=True).clone()
        for number, sample in enumerate(SAMPLES)
    ]
    for number, sample in enumerate(SAMPLES):
        runner.logits(StepBatch([rows.row(count + number, sample[:PROMPT], 0)]))
    total = DivergenceSum()
    for at in range(PROMPT, length - 1):
        step = [rows.row(count + number, sample[at : at + 1], at) for number, sample in enumerate(SAMPLES)]
        decoded = runner.logits(StepBatch(step))
        total.add(
            torch.stack([row[at] for row in whole]), decoded, torch.tensor([sample[at + 1] for sample in SAMPLES])
        )
    return total.result().kl


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if "fp8" not in form.values()])
def test_the_cpu_agrees_with_itself(form: str, folder: Path) -> None:
    compare(folder, folder, None, FORMS[form])


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_on_the_cpu(case: str, folder: Path, tmp_path: Path) -> None:
    compare(folder, write_quantized(tmp_path, case, **SIZES)[0], None, {})


@pytest.mark.parametrize("form", FORMS)
def test_what_gpus_serve(form: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_check_float8_kv", lambda _: None)
    compare(folder, folder, ReferenceKernels(), FORMS[form])


def compare(plain: Path, other: Path, kernels: Kernels | None, form: dict[str, Any]) -> None:
    wanted, actual = difference(plain, kernels), difference(other, kernels, **form)
    print(f"KL {actual:.2e}, in bfloat16 {wanted:.2e}")
    assert actual <= 2 * max(wanted, 1e-6)
