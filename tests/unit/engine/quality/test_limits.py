"""Limits of what quantization may cost on SmolLM2: few tokens here, all of the text by `benchmarks.quality`.

Its weights come from a file of 4 bits, so figures of 4 bits are worse than other models'.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from router.text.tokenizer import Tokenizer
from tandem.cli.quantization.sample_text import sample_text, token_samples
from tandem.engine.config import EngineConfig
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.quality.loading import load_for_comparison
from tandem.engine.quality.teacher_forced import compare
from tandem.engine.quantizer.quantize import QuantizationRecipe, quantize
from tandem.engine.quantizer.scheme import SCHEMES
from tandem.engine.steps.batch import StepBatch
from tests.soak import soak
from tests.unit.engine.quantizer.plain_reader import read_plainly

pytestmark = soak

SAMPLES, TOKENS = 8, 64
LAYERS = 2
"""The first layers, which alone are quantized to 4 bits: calibrating all takes minutes."""
ReportLine = Callable[[str], None]


@dataclass(frozen=True)
class Yardstick:
    folder: Path
    runner: ModelRunner
    tokenizer: Tokenizer

    def samples(self, part: str, count: int = SAMPLES, tokens: int = TOKENS) -> list[Sequence[int]]:
        text = sample_text(part, docs=False)  # type: ignore[arg-type]
        return token_samples(self.tokenizer.encode, text, count, tokens)

    def load(self, folder: Path, kernels: Kernels | None = None, **changes: str) -> ModelRunner:
        return load_for_comparison(EngineConfig.of(folder, threads=1, **changes), SAMPLES * TOKENS, kernels=kernels)

    def kl(self, runner: ModelRunner) -> float:
        """The mean over the positions of both phases, from the model in float32."""
        comparison = compare(self.runner, runner, self.samples("evaluation"))
        phases = (comparison.prefill, comparison.decode)
        return sum(phase.kl * phase.positions for phase in phases) / sum(phase.positions for phase in phases)


@pytest.fixture(scope="module")
def full(model_folder: Path) -> Iterator[Yardstick]:
    runner = load_for_comparison(EngineConfig.of(model_folder, threads=1), SAMPLES * TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "logits", _remembered(runner))
        yield Yardstick(model_folder, runner, Tokenizer(model_folder))


@pytest.fixture(autouse=True)
def _dequantized_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain kernels dequantize a weight in each product, which takes half of the time of a comparison."""
    monkeypatch.setattr(PackedWeight, "dequantized", lru_cache(maxsize=None)(PackedWeight.dequantized))


def _remembered(runner: ModelRunner) -> Callable[..., Tensor]:
    """Returns its `logits` for steps of the same samples, each computed once: every comparison asks for the same."""
    compute, known = runner.logits, dict[object, Tensor]()

    def logits(batch: StepBatch, *, every_token: bool = False) -> Tensor:
        step = every_token, *((tuple(row.token_ids), row.start, tuple(row.page_ids)) for row in batch.rows)
        if step not in known:
            known[step] = compute(batch, every_token=every_token).clone()
        return known[step]

    return logits


@pytest.mark.parametrize(
    ("changes", "limit"),
    [({"quantization": "int8"}, 0.005), ({"quantization": "fp8"}, 0.03), ({"kv_cache_dtype": "int8"}, 0.002)],
    ids=["weights int8", "weights fp8", "KV int8"],
)
def test_codes_of_8_bits(changes: dict[str, str], limit: float, full: Yardstick, report_line: ReportLine) -> None:
    """With kernels that keep the inputs of products as they are: what the codes alone cost."""
    kernels = ReferenceKernels() if changes == {"quantization": "int8"} else None
    kl = full.kl(full.load(full.folder, kernels, **changes))
    report_line(f"KL {kl:.4f}, at most {limit}")
    assert kl <= limit


def test_fp8_weights_and_inputs(full: Yardstick, report_line: ReportLine) -> None:
    """With the plain kernels, whose products have inputs of 8 bits as those of GPUs do."""
    kl = full.kl(full.load(full.folder, ReferenceKernels(), quantization="fp8"))
    report_line(f"KL {kl:.4f}, at most 0.045")
    assert kl <= 0.045


def test_the_cpu_rounds_inputs_to_8_bits_too(full: Yardstick, report_line: ReportLine) -> None:
    """Products as served on a CPU. Those whose weights and inputs both have 8 bits may cost 0.045; seen were 0.0072."""
    kl = full.kl(full.load(full.folder, quantization="int8", kv_cache_dtype="int8"))
    report_line(f"KL {kl:.4f}, at most 0.015")
    assert kl <= 0.015


def test_gptq_halves_what_rounding_to_4_bits_costs(full: Yardstick, tmp_path: Path, report_line: ReportLine) -> None:
    first = _first_layers(full.folder, tmp_path / "first")
    kl = {}
    for method in ("rtn", "gptq"):
        out, whole = tmp_path / method, tmp_path / f"{method}-whole"
        samples = full.samples("calibration", 12, 128) if method == "gptq" else ()
        quantize(first, out, QuantizationRecipe(SCHEMES["w4a16"], method), samples, device=torch.device("cpu"))
        shutil.copytree(full.folder, whole, ignore=shutil.ignore_patterns("*.safetensors"))
        weights = load_file(full.folder / "model.safetensors") | read_plainly(out)
        save_file({name: weight.contiguous() for name, weight in weights.items()}, whole / "model.safetensors")
        kl[method] = full.kl(full.load(whole))
    report_line(f"KL of {LAYERS} layers: GPTQ {kl['gptq']:.4f}, RTN {kl['rtn']:.4f}")
    assert kl["gptq"] <= kl["rtn"] / 2


def _first_layers(folder: Path, made: Path) -> Path:
    """A model of the first layers alone."""
    shutil.copytree(folder, made, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    weights = load_file(folder / "model.safetensors")
    kept = {
        name: weight for name, weight in weights.items() if "layers." not in name or int(name.split(".")[2]) < LAYERS
    }
    save_file(kept, made / "model.safetensors")
    return made
