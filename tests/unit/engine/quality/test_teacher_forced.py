"""The teacher-forced comparison: what it counts, and that equal engines do not differ."""

import dataclasses
from pathlib import Path

import pytest
import torch

from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.quality import teacher_forced
from tandem.engine.quality.divergence import DivergenceSum
from tandem.engine.quality.teacher_forced import Quality, compare
from tandem.protocol.errors import InvalidArgument
from tests.factories import tiny_engine_config, write_tiny_model

SAMPLES = [[(7 * number + 3 * position) % 160 for position in range(24)] for number in range(5)]


def _runner(folder: Path, **changes: object) -> ModelRunner:
    return ModelRunner.load(tiny_engine_config(folder, **changes), kernels=ReferenceKernels())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "one")
    write_tiny_model(folder / "other", seed=1)
    return folder


def test_the_figures_are_those_of_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(6, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    following = torch.arange(6)
    total = DivergenceSum()
    total.add(p[:2], q[:2], following[:2])
    total.add(p[2:], q[2:], following[2:])
    figures = total.result()
    p, q = p.softmax(-1), q.softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    assert figures.positions == 6
    assert figures.kl == pytest.approx(kl.mean().item(), rel=1e-5)
    assert figures.kl_error == pytest.approx(kl.std(correction=0).item() / 6**0.5, rel=1e-5)
    assert figures.top1 == (p.argmax(-1) == q.argmax(-1)).double().mean().item()
    likely = p[torch.arange(6), following].log().mean()
    assert figures.reference_perplexity == pytest.approx((-likely).exp().item(), rel=1e-5)


def test_an_engine_does_not_differ_from_itself(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_forced, "CHUNK_TOKENS", 5)
    monkeypatch.setattr(teacher_forced, "COMPANY", 3)
    done: list[float] = []
    comparison = compare(_runner(models / "one"), _runner(models / "one"), SAMPLES, done.append)
    for phase in (comparison.prefill, comparison.decode):
        assert abs(phase.kl) < 1e-6
        assert phase.top1 == 1.0
    assert comparison.prefill.positions == 5 * 12
    assert comparison.decode.positions == 5 * 11
    assert done == sorted(done)
    assert done[-1] == pytest.approx(1.0)


def test_chunks_and_company_change_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runners = _runner(models / "one"), _runner(models / "other")
    whole = compare(*runners, SAMPLES)
    monkeypatch.setattr(teacher_forced, "CHUNK_TOKENS", 5)
    monkeypatch.setattr(teacher_forced, "COMPANY", 2)
    pieces = compare(*runners, SAMPLES)
    assert whole.decode.kl > 0.01
    assert _values(whole) == pytest.approx(_values(pieces), rel=1e-3)


def _values(quality: Quality) -> list[float]:
    return [*dataclasses.astuple(quality.prefill), *dataclasses.astuple(quality.decode)]


def test_what_cannot_be_compared_is_refused(models: Path, tmp_path: Path) -> None:
    one = _runner(models / "one")
    wider = _runner(write_tiny_model(tmp_path / "wider", vocab_size=161))
    with pytest.raises(InvalidArgument, match="vocabulary has 161 tokens, the reference's 160"):
        compare(one, wider, SAMPLES)
    with pytest.raises(InvalidArgument, match="context of 512"):
        compare(one, one, [[0] * 513])
    tight = _runner(models / "one", kv_cache_bytes=3 * one.cache.page_bytes)
    with pytest.raises(InvalidArgument, match="need 10 pages of KV, the cache has 2"):
        compare(tight, one, SAMPLES)
