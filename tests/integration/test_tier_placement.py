"""A router over two real workers with tiers sends a prompt to the worker whose host memory has its beginning."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.client import Answer, Client
from tests.factories import write_tiny_model

VOCAB, CONTEXT, HEADS, HEAD_DIM = 4096, 2048, 4, 32
TOKEN_BYTES = 8 * 2 * HEADS * HEAD_DIM * 4
"""8 layers, keys and values, float32."""
PROMPTS, PROMPT_TOKENS, PAGE = 8, 1000, 16
POOL_PROMPTS = 2
"""The prompts whose KV a worker's pool holds, with an answer."""


@pytest.fixture(scope="module")
def model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCAB, hidden_size=HEADS * HEAD_DIM,
        intermediate_size=3 * HEADS * HEAD_DIM, num_hidden_layers=8, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, folder)
    return folder


def prompt(number: int) -> list[int]:
    return [3 + (number + 7 * position) % (VOCAB - 3) for position in range(PROMPT_TOKENS)]


def ask(client: Client, numbers: Sequence[int]) -> list[Answer]:
    return [client.generate(prompt(number), max_tokens=2, ignore_eos=True, temperature=0) for number in numbers]


@pytest.mark.timeout(300)
def test_a_prompt_goes_to_the_worker_whose_tier_has_it(running_cluster: Callable[..., Any], model: Path) -> None:
    cluster = running_cluster(
        model=model, mode="colocated", workers=2, dtype="float32", page_tokens=PAGE, max_step_tokens=64,
        kv_cache_bytes=(POOL_PROMPTS * (PROMPT_TOKENS + 2 * PAGE)) * TOKEN_BYTES,
        kv_host_bytes=20 * PROMPT_TOKENS * TOKEN_BYTES,
    )  # fmt: skip
    with Client(cluster.grpc_address) as client:
        first = ask(client, range(PROMPTS))
        again = ask(client, range(PROMPTS))
        assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first]
        loaded = 0
        for before, after in zip(first, again, strict=True):
            stats = after.timeline.placement
            assert stats is not None
            # A prompt that is still on the device of a worker may be pulled from there.
            if stats.predicted.reloaded_tokens and not stats.predicted.source:
                loaded += 1
                assert after.timeline.prefill_worker == before.timeline.prefill_worker
                assert stats.reloaded_tokens > 0
                assert stats.reloaded_tokens + stats.resident_tokens == (PROMPT_TOKENS - 1) // PAGE * PAGE
                drawn = CliRunner().invoke(app, ["trace", after.request_id, "--router", cluster.http_address])
                assert f"{stats.reloaded_tokens} reloaded" in drawn.output, drawn.output
        assert loaded >= PROMPTS - 2 * POOL_PROMPTS, "both pools have the others at most"
    cluster.assert_idle_and_sound()
