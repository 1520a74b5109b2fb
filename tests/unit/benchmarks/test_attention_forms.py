"""Forms of attention: what each computes and holds; no timing."""

import argparse
from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.attention_forms import head_rows, measure, overtaking_length, prompt_row
from tandem.engine.config.attention import AttentionShape, LatentShape
from tandem.engine.models.shapes import shape_config


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_all_forms_of_a_prompts_attention_agree() -> None:
    """The function compares their results and raises if one differs."""
    row = prompt_row(shape_config("qwen3-0.6b"), 130, torch.device("cpu"))
    assert set(row) == {"tokens", "engine_ms", "sdpa_ms", "naive_ms", "products_ms"}
    assert row["tokens"] == 130


def test_the_result_has_what_its_section_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole case, on the CPU."""
    forms = "benchmarks.kernels.attention_forms"
    monkeypatch.setattr(f"{forms}.prompt_row", lambda spec, tokens, _: prompt_row(spec, tokens, torch.device("cpu")))
    monkeypatch.setattr(f"{forms}.decode_seconds", lambda *_: 1e-3)
    monkeypatch.setattr(f"{forms}.run_facts", lambda _: {})
    options = argparse.Namespace(shape="qwen3-0.6b", lengths=[16, 48], rows=2, context=64, network_gbps=100.0)
    name, result = measure(options)
    assert name == "attention-forms-qwen3-0.6b"
    assert [row["tokens"] for row in result["prompts"]] == [16, 48]
    assert [row["form"] for row in result["heads"]] == ["MHA", "GQA", "MQA", "MLA"]
    assert result.keys() >= {"overtakes_products_at", "rows", "context", "network_gbps", "shape", "dtype"}


def test_a_form_that_differs_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.kernels.attention_forms._naive", lambda q, *_: torch.zeros_like(q))
    with pytest.raises(AssertionError, match="naive differs from SDPA"):
        prompt_row(shape_config("qwen3-0.6b"), 20, torch.device("cpu"))


def test_attention_overtakes_the_products_where_their_ratio_is_1() -> None:
    """Attention grows with the square of the length, products with the length: the ratio is a line."""
    times = {tokens: (tokens**2 / 50_000, float(tokens)) for tokens in (512, 32_768, 65_536)}
    assert overtaking_length(times) == 50_000
    assert overtaking_length({512: (1.0, 2.0)}) is None


def test_forms_differ_in_their_kv_heads_alone() -> None:
    spec = shape_config("llama-3-8b")
    asked: list[tuple[AttentionShape | LatentShape, int, int]] = []

    def seconds(*given: object) -> float:
        asked.append(given)  # type: ignore[arg-type]
        return 1e-4

    rows = head_rows(spec, 64, 4096, 400.0, seconds)
    assert [row["form"] for row in rows] == ["MHA", "GQA", "MQA", "MLA"]
    assert [row["bytes_per_token"] for row in rows] == [524_288, 131_072, 16_384, 36_864]
    assert {row["step_ms"] for row in rows} == {3.2}
    assert rows[1]["hand_over_ms"] == pytest.approx(4096 * 131_072 / 50e9 * 1e3, abs=0.01)
    shape = spec.layers[0].attention.shape  # type: ignore[union-attr]
    assert [form for form, *_ in asked[:3]] == [replace(shape, kv_heads=heads) for heads in (32, 8, 1)]
    assert {given[1:] for given in asked} == {(64, 4096)}
