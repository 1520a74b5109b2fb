"""Loading, limits and facts of the runner, and seeded sampling through it."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import weight_bytes
from tandem.engine.models.load_spec import load_spec
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import History
from tandem.engine.weights.safetensors_file import read_header
from tandem.protocol.errors import Internal, InvalidArgument, ModelError
from tandem.tokenizers.grammars import Grammars, of_regex
from tests.factories import draw, row, tiny_engine_config, write_tiny_model
from tests.small_tokenizer import save_tokenizer

IDS = list(range(10, 30))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama3")


@pytest.fixture
def runner(folder: Path) -> ModelRunner:
    return ModelRunner.load(tiny_engine_config(folder))


def test_facts(folder: Path, runner: ModelRunner) -> None:
    facts = runner.facts
    assert (facts.name, facts.vocab_size, facts.eos_token_ids, facts.dtype) == ("tiny-llama", 160, (2,), "float32")
    assert facts.max_context == 512
    assert (runner.device_name, runner.page_tokens) == ("cpu", 16)
    assert ModelRunner.load(tiny_engine_config(folder, served_model_names=("mine",))).facts.name == "mine"


def test_no_answer_waits_for_the_tokenizer_of_grammars(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded before the worker serves; llguidance holds the GIL meanwhile."""
    loaded: list[Path] = []

    def noting(tokenizer: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
        loaded.append(tokenizer)
        return Grammars(tokenizer, vocab_size, eos_token_ids)

    save_tokenizer(tmp_path, 300)
    monkeypatch.setattr("tandem.engine.load_engine.shared_grammars", noting)
    runner = ModelRunner.load(tiny_engine_config(folder, tokenizer=tmp_path))
    assert loaded == [tmp_path]
    runner.begin_answer(History([5], []), of_regex("a+"))
    assert loaded == [tmp_path]


def test_context_is_what_the_pool_can_hold(folder: Path) -> None:
    page_bytes = 3 * 2 * 2 * 16 * 16 * 4
    small = ModelRunner.load(tiny_engine_config(folder, kv_cache_bytes=4 * page_bytes + 1))
    assert (small.cache.pages, small.pool.counts().total, small.facts.max_context) == (3, 3, 48)
    with pytest.raises(InvalidArgument, match=f"kv_cache_bytes.*{2 * page_bytes}"):
        ModelRunner.load(tiny_engine_config(folder, kv_cache_bytes=2 * page_bytes - 1))


def test_context_is_bounded_by_a_setting(folder: Path) -> None:
    assert ModelRunner.load(tiny_engine_config(folder, max_model_len=100)).facts.max_context == 100
    with pytest.raises(InvalidArgument, match="max_model_len: is 513"):
        ModelRunner.load(tiny_engine_config(folder, max_model_len=513))


def test_weights_that_the_host_has_no_room_for_are_not_allocated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ModelRunner.load(tiny_engine_config(folder))
    taken = weight_bytes(runner.spec, torch.float32)
    free = [taken - 1]
    monkeypatch.setattr("tandem.engine.memory.free_bytes", lambda _: free[0])
    with pytest.raises(InvalidArgument, match=r"device: the weights take .* memory are free; use a GPU, another dtype"):
        ModelRunner.load(tiny_engine_config(folder))
    free[0] += 1
    assert ModelRunner.load(tiny_engine_config(folder)).facts == runner.facts


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_the_bytes_of_weights_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / family, family)
    entries = read_header(model / "model.safetensors").values()
    stored = sum(4 * math.prod(entry.shape) for entry in entries)
    assert weight_bytes(load_spec(model), torch.float32) == stored
    assert weight_bytes(load_spec(model), torch.bfloat16) == stored // 2


def test_a_device_without_room_for_the_weights_says_how_large_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr("tandem.engine.load_engine.fill_randomly", refuse)
    with pytest.raises(InvalidArgument, match=r"device: cpu has no memory for the weights, 0\.00 GiB; free memory"):
        ModelRunner.load(tiny_engine_config(folder, random_weights=True))


@pytest.mark.parametrize("context", [1, 10, 17])
def test_a_context_shorter_than_a_page(tmp_path: Path, context: int) -> None:
    short = write_tiny_model(tmp_path / "short", "llama3", max_position_embeddings=context)
    assert ModelRunner.load(tiny_engine_config(short)).facts.max_context == context


def test_cache_is_zero_aligned_and_described(runner: ModelRunner) -> None:
    cache = runner.cache
    assert cache.tensor.shape == (cache.pages + 1, 3, 2, 2, 16, 16)
    assert cache.base_address == cache.tensor.data_ptr()
    assert cache.base_address % 4096 == 0
    assert not cache.tensor.any()
    assert cache.page_bytes == cache.tensor[0].nbytes == cache.tensor.stride(0) * cache.item_bytes
    assert (cache.dtype, cache.memory, cache.device_id) == ("float32", "DRAM", 0)


def test_compatibility_facts_differ_where_kv_does(folder: Path, runner: ModelRunner, tmp_path: Path) -> None:
    facts = runner.compatibility_facts()
    assert ModelRunner.load(tiny_engine_config(folder, kv_cache_bytes=2 << 20)).compatibility_facts() == facts
    other = write_tiny_model(tmp_path / "other", "llama3", vocab_size=161)
    for name, config in {
        "page_tokens": tiny_engine_config(folder, page_tokens=32),
        "dtype kv_cache_dtype": tiny_engine_config(folder, dtype="bfloat16"),
        "kv_cache_dtype": tiny_engine_config(folder, kv_cache_dtype="int8"),
        "model": tiny_engine_config(other),
    }.items():
        theirs = ModelRunner.load(config).compatibility_facts()
        assert [mine[0] for mine, their in zip(facts, theirs, strict=True) if mine != their] == name.split()


def test_compatibility_facts_differ_if_the_context_chooses_other_factors_of_longrope(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, "phi3_longrope")
    short, border, long = (
        ModelRunner.load(tiny_engine_config(model, max_model_len=length)).compatibility_facts()
        for length in (8, 16, 17)
    )
    assert short == border
    assert set(long) ^ set(short) == {("longrope_factors", "short"), ("longrope_factors", "long")}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "tpu"}, "device: 'tpu' is not known; use cpu, cuda or cuda:N"),
        ({"device": "cpu:1"}, "not known"),
        ({"device": "cuda:x"}, "not known"),
        ({"device": "cuda:99"}, "device: 'cuda:99' is not there"),
        ({"dtype": "int8"}, "dtype: 'int8' is not supported; use auto, float32, bfloat16, float16"),
        ({"page_tokens": 0}, "page_tokens: 0"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype: 'int4' is not supported; use auto, int8, fp8"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype: fp8 is served on GPUs only; use int8"),
    ],
)
def test_bad_settings_are_refused(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        ModelRunner.load(tiny_engine_config(folder, **changes))


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is not a folder"):
        ModelRunner.load(tiny_engine_config(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "at least one row"),
        ([row([], 0, [0])], "at least one token"),
        ([row([160], 0, [0])], "token id is outside"),
        ([row([-1], 0, [0])], "token id is outside"),
        ([row([1], 0, [99999])], "page id is outside"),
        ([row([1], 0, [-1])], "page id is outside"),
        ([row([1] * 17, 0, [0])], "brings 1 pages"),
        ([row([1], -1, [0])], "from -1"),
        ([row([1], 512, list(range(33)))], "context is 512"),
    ],
)
def test_malformed_steps_are_refused(runner: ModelRunner, rows: list[StepRow], words: str) -> None:
    steps = runner.graph_use.misses
    with pytest.raises(Internal, match=words):
        runner.run(StepBatch(rows))
    # The next step works, and counts alone.
    assert runner.run(StepBatch([row(IDS, 0, [0, 1])])).token_ids[0] is not None
    assert runner.graph_use.misses == steps + 1


def test_a_step_larger_than_any_before(folder: Path) -> None:
    """The packer's buffer grows, and a small step after a large one sees nothing of it."""
    runner = ModelRunner.load(tiny_engine_config(folder, kv_cache_bytes=4 << 20))
    alone = runner.logits(StepBatch([row(IDS, 0, [0, 1])])).clone()
    many = [row([5] * 200, 0, list(range(13 * i, 13 * i + 13))) for i in range(12)]
    assert len(runner.run(StepBatch(many)).token_ids) == 12
    torch.testing.assert_close(runner.logits(StepBatch([row(IDS, 0, [7, 3])])), alone)


def test_seeded_rows_continue_elsewhere(folder: Path) -> None:
    """Prefill on one runner, decode on another in a batch: the same tokens as alone."""

    def generate(company: int) -> list[int | None]:
        first, second = (ModelRunner.load(tiny_engine_config(folder)) for _ in range(2))
        drawn = [dataclasses.replace(draw(temperature=0.9, top_p=0.95, seed=11), index=i) for i in range(12)]
        token_ids = list(first.run(StepBatch([StepRow(IDS, 0, [3, 1], drawn[0])])).token_ids)
        second.cache.tensor[[9, 4]] = first.cache.tensor[[3, 1]]
        for i in range(1, 12):
            others = [StepRow([7], 0, [20 + j], draw(temperature=1.0, seed=j)) for j in range(company)]
            mine = StepRow([token_ids[-1] or 0], len(IDS) + i - 1, [9, 4], drawn[i])
            token_ids.append(second.run(StepBatch([*others, mine])).token_ids[-1])
        return token_ids

    alone = generate(0)
    assert generate(5) == alone
    assert len(set(alone)) > 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(folder: Path, runner: ModelRunner, dtype: str) -> None:
    half = ModelRunner.load(tiny_engine_config(folder, dtype=dtype))
    batch = StepBatch([row(IDS, 0, [0, 1])])
    wanted, actual = runner.logits(batch), half.logits(batch)
    assert actual.dtype == getattr(torch, dtype)
    assert (actual.float() - wanted).abs().max() < 0.1 * wanted.std()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_8_bit_kv_is_close_and_holds_more_tokens(folder: Path, dtype: str) -> None:
    plain, int8 = (
        ModelRunner.load(tiny_engine_config(folder, dtype=dtype, kv_cache_dtype=kind)) for kind in ("auto", "int8")
    )
    assert (int8.cache.dtype, int8.facts.dtype, int8.dtype) == ("int8", dtype, getattr(torch, dtype))
    # Heads of 16 dimensions: a scale of 4 bytes beside 16 codes.
    assert int8.cache.page_bytes * 16 * plain.dtype.itemsize == plain.cache.page_bytes * 20
    assert int8.pool.counts().total > plain.pool.counts().total
    assert int8.roofline.sizes.weight_bytes == plain.roofline.sizes.weight_bytes
    assert int8.roofline.sizes.kv_bytes_per_token * int8.page_tokens == int8.cache.page_bytes
    batch = StepBatch([row(IDS, 0, [0, 1])])
    wanted, actual = plain.logits(batch).float().clone(), int8.logits(batch).float()
    assert 0 < (actual - wanted).abs().max() < 0.05 * wanted.std()


@pytest.mark.parametrize(
    "scheme",
    [
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
        {"quantization": "int4"},
        {"quantization": "fp8"},
        {"quantization": "int8", "kv_cache_dtype": "int8", "dtype": "bfloat16"},
    ],
    ids=["KV int8", "int8", "int4", "fp8", "int8 and KV int8 in bfloat16"],
)
def test_quantized_answers_continue_elsewhere_and_in_company(scheme: dict[str, Any], folder: Path) -> None:
    """Pages are copied as bytes, as a transfer does; checksums agree, and the tokens are those of one runner alone."""
    first, second = (ModelRunner.load(tiny_engine_config(folder, **scheme)) for _ in range(2))
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 11}

    def generate(runner: ModelRunner, pages: list[int], company: int, token: int | None) -> list[int | None]:
        token_ids = [token]
        for index in range(1, 12):
            others = [StepRow([7], 0, [20 + other], draw(temperature=1.0, seed=other)) for other in range(company)]
            prompt = [StepRow(IDS, 0, [30, 31], draw(seed=1))] if company else []
            mine = StepRow([token_ids[-1] or 0], len(IDS) + index - 1, pages, draw(index=index, **sampled))
            token_ids.append(runner.run(StepBatch([*prompt, *others, mine])).token_ids[-1])
        return token_ids

    (token,) = first.run(StepBatch([StepRow(IDS, 0, [3, 1], draw(**sampled))])).token_ids
    second.cache.storage[[9, 4]] = first.cache.storage[[3, 1]]
    filled = [16, len(IDS) - 16]
    assert second.page_sums([9, 4], filled) == first.page_sums([3, 1], filled)
    alone = generate(first, [3, 1], 0, token)
    assert generate(second, [9, 4], 5, token) == alone
    assert len(set(alone)) > 3
    # A prompt in chunks beside other rows has the same first token, and the same bytes in its pages.
    for start, tokens in ((0, IDS[:7]), (7, IDS[7:])):
        rows = [StepRow([7], 0, [20], draw(seed=2)), StepRow(tokens, start, [12, 13], draw(**sampled))]
        chunked = second.run(StepBatch(rows)).token_ids[-1]
    assert chunked == token
    assert second.page_sums([12, 13], filled) == first.page_sums([3, 1], filled)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_8_bit_latents_are_close_and_hold_more_tokens(tmp_path: Path, dtype: str) -> None:
    folder = write_tiny_model(tmp_path / "latent", "deepseek_v3")
    plain, int8 = (
        ModelRunner.load(tiny_engine_config(folder, dtype=dtype, kv_cache_dtype=kind)) for kind in ("auto", "int8")
    )
    (dim,) = plain.cache.first.dims
    assert int8.cache.page_bytes * dim * plain.dtype.itemsize == plain.cache.page_bytes * (dim + 4)
    assert int8.roofline.sizes.kv_bytes_per_token * int8.page_tokens == int8.cache.page_bytes
    batch = StepBatch([row(IDS, 0, [0, 1])])
    wanted, actual = plain.logits(batch).float().clone(), int8.logits(batch).float()
    assert 0 < (actual - wanted).square().mean().sqrt() < 0.05 * wanted.std()


def test_latents_of_sparse_attention_are_not_cached_in_8_bits(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "latent", "deepseek_v32")
    with pytest.raises(InvalidArgument, match="kv_cache_dtype: the latents of sparse attention are not cached as int8"):
        ModelRunner.load(tiny_engine_config(folder, kv_cache_dtype="int8"))


def test_a_model_whose_activations_leave_the_range_of_float16_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama3")
    config = tiny_engine_config(folder, dtype="float16")
    assert not ModelRunner.load(config).cache.storage[0].any(), "a page that nobody owns is left as it was"
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("up_proj.weight", "down_proj.weight")):
            tensor.mul_(1000)  # in range, but not the product
    save_file(tensors, path)
    ModelRunner.load(tiny_engine_config(folder, dtype="bfloat16"))
    with pytest.raises(ModelError, match=r"numbers beyond 65504, the largest of float16; use --dtype bfloat16"):
        ModelRunner.load(config)
