"""Adapters of a model that is divided among ranks: the logits of one rank, for adapters of the start and later ones."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.adapters.folder import AdapterFolder
from tandem.engine.adapters.reader import read_adapter
from tandem.engine.config import EngineConfig
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.parallel.adapter_stream import AdapterSender
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.protocol.errors import ModelError, Unavailable
from tandem.protocol.messages import AdapterFacts
from tandem.settings.parsing import NamedPath
from tests.adapters import ATTENTION, EVERY, TinyAdapter, load_at_runtime
from tests.factories import draw, tiny_engine_config, write_tiny_model
from tests.ranks import group_runner
from tests.soak import soak

pytestmark = pytest.mark.usefixtures("adapters_read_here")

TOLERANCE = 2e-5
IDS = [(7 * position + 3) % 157 for position in range(30)]
STACKED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
THREE: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}


def logits_of(runner: ModelRunner, numbers: Sequence[int]) -> torch.Tensor:
    """Returns the logits [2, rows, vocab] of a prompt and of a token after it, in a row for each adapter number."""
    share = 2 * runner.kv_pages.groups
    pages = [list(range(row * share, (row + 1) * share)) for row in range(len(numbers))]
    steps = []
    for start, end in ((0, len(IDS) - 1), (len(IDS) - 1, len(IDS))):
        rows = [
            StepRow(IDS[start:end], start, own, draw(), adapter=number)
            for own, number in zip(pages, numbers, strict=True)
        ]
        steps.append(runner.logits(StepBatch(rows)).clone())
    return torch.stack(steps)


def with_adapters(folder: Path, adapters: Sequence[TinyAdapter], **changes: Any) -> EngineConfig:
    paths = [adapter.write(folder / f"adapter {number}") for number, adapter in enumerate(adapters)]
    sources = tuple(NamedPath(path.name, path) for path in paths)
    return tiny_engine_config(folder, loras=sources, kv_cache_bytes=8 << 20, **changes)


@pytest.mark.parametrize(
    ("family", "ranks", "modules", "changes"),
    [
        ("llama3", 2, EVERY, {}),
        ("llama3", 3, EVERY, THREE),
        ("mqa", 4, EVERY, {}),
        ("phi3", 2, STACKED, {}),
        ("deepseek_v2", 2, ("self_attn.o_proj",), {}),
        pytest.param("qwen2_moe", 4, ATTENTION, {}, marks=soak),
        pytest.param("gemma2", 2, EVERY, {}, marks=soak),
    ],
)
def test_logits_are_those_of_one_rank(
    family: str, ranks: int, modules: Sequence[str], changes: dict[str, Any], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path, family, **changes)
    adapters = [TinyAdapter(family, seed=seed, modules=modules, changes=changes) for seed in (1, 2)]
    config = with_adapters(tmp_path, adapters)
    wanted = logits_of(ModelRunner.load(config, kernels=ReferenceKernels()), [1, 0, 2])
    assert (wanted[:, 0] - wanted[:, 1]).abs().max() > 0.01
    with group_runner(config, ranks) as (runner, _):
        torch.testing.assert_close(logits_of(runner, [1, 0, 2]), wanted, atol=TOLERANCE, rtol=TOLERANCE)


def test_an_adapter_that_is_loaded_at_runtime_is_on_all_ranks(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = with_adapters(tmp_path, [TinyAdapter(seed=1)], runtime_loras=True, max_loras=3)
    path = TinyAdapter(seed=2).write(tmp_path / "new")
    alone = ModelRunner.load(config, kernels=ReferenceKernels())
    wanted = logits_of(alone, [1, load_at_runtime(alone, path)])
    with group_runner(config, 2) as (runner, _):
        torch.testing.assert_close(
            logits_of(runner, [1, load_at_runtime(runner, path)]), wanted, atol=TOLERANCE, rtol=TOLERANCE
        )


def test_an_adapter_that_another_rank_cannot_write_is_not_listed(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = with_adapters(tmp_path, [], runtime_loras=True)
    path = TinyAdapter(seed=2).write(tmp_path / "new")
    with group_runner(config, 2) as (runner, _):
        folder = runner.adapters.read(path)
        own_write = runner.adapters.on_write

        def changed_before(slot: int, folder: AdapterFolder) -> None:
            TinyAdapter(seed=3).write(path)
            own_write(slot, folder)

        runner.adapters.on_write = changed_before
        facts = AdapterFacts("new", folder.identity, str(path))
        with pytest.raises(ModelError, match=r"rank 1: .*new changed while it was read"):
            runner.adapters.fill(runner.adapters.claim(folder.identity, ()), facts, folder)
        assert runner.adapters.facts == ()


def test_a_rank_that_has_ended_is_an_error_of_the_next_adapter(tmp_path: Path) -> None:
    folder = read_adapter(TinyAdapter().write(tmp_path))
    mine, theirs = socket.socketpair()
    theirs.close()
    sender = AdapterSender([mine])
    with pytest.raises(Unavailable, match="a rank of this worker has ended"):
        sender.write(0, folder)
    sender.close()
