"""The model that retrieves by construction: it finds every number, unless keys and values are wrong."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.command_line import run_case
from benchmarks.quality import retrieval
from benchmarks.quality.__main__ import CASES
from benchmarks.quality.needle import DEPTHS, found_needles
from tandem.engine.config import EngineConfig
from tandem.engine.kernels import reference
from tandem.engine.kernels.kv_cache import quantize_kv
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.quality.loading import load_for_comparison

TOKENS, FEW, CHUNK = 700, 200, 256


def test_every_number_is_found_with_16_and_8_bits(capsys: pytest.CaptureFixture[str]) -> None:
    run_case("quality", "", CASES, ["retrieval", "--lengths", f"{TOKENS},2000", "--max-step-tokens", str(CHUNK)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    every = {"auto": len(DEPTHS), "int8": len(DEPTHS)}
    assert result["needles"] == {str(TOKENS): every, "2000": every}


def coarse(codes: Tensor, call: int) -> Tensor:
    """Codes as of 3 bits."""
    return (codes / 42).round().to(torch.int8) * 42


def values_of_the_token_before(codes: Tensor, call: int) -> Tensor:
    """Values that lie one position too far; keys are quantized first."""
    return codes.roll(1, 0) if call % 2 else codes


@pytest.mark.parametrize("damage", [coarse, values_of_the_token_before])
def test_damaged_codes_lose_numbers(
    damage: Callable[[Tensor, int], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()

    def damaged(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        codes, scales = quantize_kv(values, dtype)
        return damage(codes, next(calls)), scales

    config = EngineConfig.of(retrieval.write_retrieval_model(tmp_path), kv_cache_dtype="int8", max_step_tokens=CHUNK)
    runner = load_for_comparison(config, FEW, kernels=ReferenceKernels())
    needles = retrieval.retrieval_needles(FEW)
    assert found_needles(runner, retrieval.said, needles, CHUNK) == len(DEPTHS)
    monkeypatch.setattr(reference, "quantize_kv", damaged)
    assert found_needles(runner, retrieval.said, needles, CHUNK) == 0
