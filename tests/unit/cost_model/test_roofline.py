"""The first guess, against what was measured on an H200."""

import pytest

from tandem.cost_model.roofline import GPU, ModelSizes, WindowedLayers, guess
from tandem.cost_model.step_cost import StepCost
from tandem.cost_model.step_work import StepWork, chunk_pairs
from tandem.protocol.errors import InvalidArgument
from tandem.settings.ceilings import Ceilings, parse_ceilings

WEIGHTS = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256
LLAMA_3_8B = ModelSizes(
    weights=WEIGHTS, weight_bytes=2 * WEIGHTS, kv_bytes_per_token=131072, attention_flop_per_pair=4 * 32 * 4096
)


@pytest.mark.parametrize(("rows", "ms"), [(1, 4.0), (32, 5.5), (128, 9.3)])
def test_decode_steps_of_an_8b_model(rows: int, ms: float) -> None:
    """Each row has about 1,000 tokens of context."""
    assert StepCost(guess(LLAMA_3_8B, GPU)).decode_step_seconds(rows, rows * 1000) * 1e3 == pytest.approx(ms, rel=0.25)


@pytest.mark.parametrize(("tokens", "ms"), [(512, 15.2), (2048, 47.8)])
def test_prompts_of_an_8b_model(tokens: int, ms: float) -> None:
    assert StepCost(guess(LLAMA_3_8B, GPU)).prefill_seconds(tokens, chunk_pairs(tokens, 0), 2048)[
        0
    ] * 1e3 == pytest.approx(ms, rel=0.25)


def test_prompts_cost_more_than_their_arithmetic() -> None:
    """Workers on H200s had learned 1.1 to 3.1 ms, 1.6 at the median."""
    assert guess(LLAMA_3_8B, GPU).prompt_base_s * 1e3 == pytest.approx(1.6, rel=0.1)


def test_the_knee_is_where_arithmetic_takes_as_long_as_the_weights() -> None:
    assert guess(LLAMA_3_8B, GPU).free_tokens == 167


GEMMA_3_27B = ModelSizes(
    weights=27 * 10**9,
    weight_bytes=54 * 10**9,
    kv_bytes_per_token=62 * 8192 * 2,
    attention_flop_per_pair=62 * 16384,
    windowed=(WindowedLayers(1024, 52 * 8192 * 2, 52 * 16384),),
)


@pytest.mark.parametrize(("rows", "context"), [(1, 2500), (32, 2500), (1, 131_072), (32, 131_072)])
def test_windows_are_read_once_however_long_the_context_is(rows: int, context: int) -> None:
    """The guess follows the bytes that a step must read."""
    work = StepWork(decode_rows=rows, decode_context_tokens=rows * context)
    least_s = GEMMA_3_27B.step_bytes(work) / GPU.bytes_per_s
    guessed_s = StepCost(guess(GEMMA_3_27B, GPU)).decode_step_seconds(rows, rows * context)
    assert least_s < guessed_s < 1.15 * least_s + 1e-3


def test_windows_bound_the_pairs_of_attention() -> None:
    work = StepWork(prefill_tokens=100, prefill_pairs=100 * 4000.0, decode_rows=2, decode_context_tokens=600)
    products = 2 * GEMMA_3_27B.weights * 102
    full, windowed = 10 * 16384, 52 * 16384
    pairs = full * (400_000 + 600) + windowed * (100 * 1024 + 600)
    assert GEMMA_3_27B.step_flops(work) == products + pairs


def test_ceilings_that_an_operator_gives() -> None:
    assert parse_ceilings("--device-ceilings", "990:4800") == Ceilings(9.9e14, 4.8e12, 0.0)
    for wrong in ("990", "a:b", "0:1", "1:-1", "1:2:3", "nan:1", "1:inf"):
        with pytest.raises(InvalidArgument, match="--device-ceilings"):
            parse_ceilings("--device-ceilings", wrong)
