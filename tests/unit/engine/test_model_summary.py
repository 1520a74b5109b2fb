"""The lines about a model that `tandem plan`, `tandem status` and `tandem why` show."""

import pytest

from tandem.engine.model_summary import model_summary
from tandem.engine.models.load_spec import parse_spec, quantized_at_load
from tandem.engine.models.shapes import shape_config
from tests.factories import FAMILIES


def test_a_dense_model() -> None:
    assert model_summary(shape_config("llama-3-8b"), 2) == (
        "8.03 B parameters",
        "131,072 bytes of KV per token",
        "attention: 32 layers see all tokens",
    )


def test_quantization() -> None:
    model = quantized_at_load(shape_config("llama-3-8b"), "int8")
    assert model_summary(model, 2, 132 / 128)[1:3] == (
        "weights: int8, 8.46 GiB",
        "67,584 bytes of KV per token in 8 bits",
    )


QWEN3_30B = FAMILIES["qwen3_moe"] | {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        (
            QWEN3_30B,
            [
                "30.5 B parameters, 3.04 B active per token",
                "98,304 bytes of KV per token",
                "attention: 48 layers see all tokens",
                "128 experts, 8 per token",
            ],
        ),
        (FAMILIES["gpt_oss"], ["attention: 2 layers see 24 tokens, 2 all, with sinks", "8 experts, 3 per token"]),
        (
            FAMILIES["gemma3"],
            ["1,024 bytes of KV per token, pages of 2 groups of 2 layers", "attention: 2 layers see 16 tokens, 2 all"],
        ),
        (
            FAMILIES["deepseek_v3"],
            [
                "attention: 3 layers see all tokens, latents of 40 values",
                "8 experts, 3 per token and a shared one in 2 of 3 layers",
            ],
        ),
    ],
)
def test_experts_windows_and_latents(config: dict[str, object], lines: list[str]) -> None:
    shown = model_summary(parse_spec(config), 2)
    assert [line for line in shown if line in lines] == lines, shown
