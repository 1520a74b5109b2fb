"""A draft model: what it drafts, the KV that it keeps and rolls back, its pages, and its folder."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import weight_bytes
from tandem.engine.models.load_spec import load_spec
from tandem.engine.speculation.draft_folder import DraftKind, check_draft_folder, draft_kind
from tandem.engine.speculation.draft_model import DraftModel
from tandem.engine.speculation.load_draft import split_kv
from tandem.engine.speculation.load_draft_model import memory_of
from tandem.engine.speculation.proposer import WantedDraft
from tandem.engine.steps.sampling_metadata import NO_TOKEN, SamplingInput
from tandem.protocol.errors import InvalidArgument, ModelError
from tandem.protocol.messages import SamplingParams
from tests.factories import tiny_engine_config, write_tiny_model
from tests.fake_engine import PAGE_TOKENS, FakeEngine, next_token
from tests.small_tokenizer import save_tokenizer

SAMPLING = SamplingParams(64)


def draws(first: int, count: int) -> list[SamplingInput]:
    return [SamplingInput(SAMPLING, first + index) for index in range(count)]


def computed(model: DraftModel, wanted: Mapping[str, Sequence[SamplingInput]]) -> Sequence[Sequence[int]]:
    return model.compute([WantedDraft(name, some) for name, some in wanted.items()])


def expected(tokens: Sequence[int], first: int, count: int) -> list[int]:
    """Returns what the fake model draws behind these tokens, with draws from number `first` on."""
    text = list(tokens)
    for index in range(count):
        text.append(next_token(text, first + index))
    return text[len(tokens) :]


@pytest.mark.parametrize("windows", [(None,), (None, 5, 3)])
def test_drafts_are_the_models_own_tokens_whatever_was_accepted(
    windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "windows", windows)
    dice, engine = random.Random(1), FakeEngine(pages=400)
    model = DraftModel(engine)
    texts = {name: [dice.randrange(3, 900) for _ in range(length)] for name, length in (("a", 3), ("b", 30), ("c", 41))}
    for name, text in texts.items():
        model.begin(name, text)
    for step in range(60):
        wanted = {name: draws(step, model.capacity(name, dice.randint(1, 7))) for name in texts if dice.random() < 0.8}
        wanted = {name: some for name, some in wanted.items() if some}
        late = {name: model.missing(name) - 1 for name in wanted if model.missing(name) > 8}
        if late:
            model.store_context({name: dice.randint(1, tokens) for name, tokens in late.items()})
        drafts = dict(zip(wanted, computed(model, wanted), strict=True))
        for name, text in texts.items():
            drafted = list(drafts.get(name, ()))
            assert drafted == expected(text, step, len(drafted))
            accepted = dice.randint(0, len(drafted))
            gained = [*drafted[:accepted], dice.randrange(3, 900)]
            model.extend(name, gained)
            texts[name] = text + gained
        engine.pool.check_integrity()
    for name in texts:
        model.leave(name)
    assert engine.pool.counts().free == 400


def test_only_what_the_next_draft_needs_is_computed() -> None:
    engine = FakeEngine()
    model = DraftModel(engine)
    model.begin("a", [5, 6, 7])
    assert model.missing("a") == 3
    assert model.capacity("a", 4) == 4
    drafted = computed(model, {"a": draws(0, 4)})[0]
    assert [len(batch.rows) for batch in engine.batches] == [3, 1, 1, 1]
    model.extend("a", [*drafted, 9])
    assert model.missing("a") == 2, "the last draft was drawn and not fed"
    model.extend("a", [10])
    assert model.missing("a") == 3
    model.capacity("a", 1)
    computed(model, {"a": draws(5, 1)})
    model.extend("a", [11])
    assert model.missing("a") == 1, "of a wrong draft nothing is left"


def test_a_full_pool_leaves_a_request_without_drafts() -> None:
    model = DraftModel(engine := FakeEngine(pages=6))
    model.begin("a", list(range(3, 3 + 4 * PAGE_TOKENS)))
    model.begin("b", list(range(3, 3 + 4 * PAGE_TOKENS)))
    assert model.capacity("a", 3) == 3
    assert model.capacity("b", 3) == 0
    assert engine.pool.counts().owned == 5, "a part of a context is of no use"
    assert model.capacity("a", 7) == 7
    assert model.capacity("a", 20) == 6 * PAGE_TOKENS - (4 * PAGE_TOKENS - 1)
    model.leave("a")
    assert model.capacity("b", 3) == 3
    engine.pool.check_integrity()


def test_drafts_end_with_the_context_of_the_model() -> None:
    model = DraftModel(FakeEngine(pages=80))
    model.begin("a", [3] * 253)
    assert model.capacity("a", 7) == 256 - 252
    model.begin("b", [3] * 300)
    assert model.capacity("b", 7) == 0


def test_where_the_draft_model_has_no_token_the_draft_is_a_token_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is fed to the next step, which would take NO_TOKEN for an address; the target model refuses it."""
    monkeypatch.setattr(FakeEngine, "_row", lambda *_: NO_TOKEN)
    model = DraftModel(FakeEngine())
    model.begin("a", [3])
    assert model.capacity("a", 3) == 3
    assert computed(model, {"a": draws(1, 3)}) == [[0, 0, 0]]


def test_a_request_is_known_once() -> None:
    model = DraftModel(FakeEngine())
    model.begin("a", [3])
    with pytest.raises(ValueError, match="known already"):
        model.begin("a", [3])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_model(folder / "target")
    write_tiny_model(folder / "draft", "smollm2", num_hidden_layers=1)
    return folder


def test_folders_that_do_not_fit_are_refused(folders: Path) -> None:
    spec, target = load_spec(folders / "target"), folders / "target"
    assert draft_kind(folders / "draft") is DraftKind.MODEL
    check_draft_folder(folders / "draft", spec, target)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        check_draft_folder(folders / "nowhere", spec, target)
    other = write_tiny_model(folders / "other", vocab_size=96)
    with pytest.raises(ModelError, match="a vocabulary of 96 tokens, the model one of 160"):
        check_draft_folder(other, spec, target)
    (folders / "strange").mkdir()
    (folders / "strange" / "config.json").write_text('{"architectures": ["Oracle"], "model_type": "oracle"}')
    with pytest.raises(ModelError, match=r"describes .*Oracle.* complete models, Medusa heads"):
        check_draft_folder(folders / "strange", spec, target)


def test_another_tokenizer_is_refused(folders: Path, tmp_path: Path) -> None:
    spec, draft = load_spec(folders / "target"), write_tiny_model(tmp_path / "draft")
    save_tokenizer(draft)
    (same := tmp_path / "same").mkdir()
    save_tokenizer(same)
    check_draft_folder(draft, spec, same)
    save_tokenizer(same, texts=["other words"])
    with pytest.raises(ModelError, match="has another tokenizer"):
        check_draft_folder(draft, spec, same)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_both_models_hold_as_many_tokens(folders: Path, dtype: str) -> None:
    config = tiny_engine_config(
        folders / "target", kv_cache_bytes=1 << 22, draft=folders / "draft", kv_cache_dtype=dtype
    )
    spec = load_spec(config.served.model)
    kv = split_kv(config, spec, 16, torch.device("cpu"), None, whole=spec)
    assert kv.both == 1 << 22
    runner = ModelRunner.load(config)
    assert runner.cache.storage.nbytes <= (kv.target or 0)
    model = runner.draft_proposer()
    assert model.memory["kv"] + runner.cache.storage.nbytes <= 1 << 22
    assert abs(model._runner.pool.total - runner.pool.total) <= 1
    assert model.memory == memory_of(model._runner)
    with pytest.raises(InvalidArgument, match="hold no page"):
        ModelRunner.load(tiny_engine_config(folders / "target", kv_cache_bytes=1 << 14, draft=folders / "draft"))


def test_memory_counts_before_it_is_taken(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = folders / "target", folders / "draft"
    free = [sum(weight_bytes(load_spec(path), torch.float32) for path in (target, draft)) - 1]
    monkeypatch.setattr("tandem.engine.memory.free_bytes", lambda _: free[0])
    with pytest.raises(InvalidArgument, match="device: the weights take"):
        ModelRunner.load(tiny_engine_config(target, draft=draft))
    ModelRunner.load(tiny_engine_config(target))
    free[0] += 1
    ModelRunner.load(tiny_engine_config(target, draft=draft))
