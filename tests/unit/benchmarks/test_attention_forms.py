"""Forms of attention: what each computes and holds; no timing."""

from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.attention_forms import head_rows, overtaking_length, prompt_row
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
