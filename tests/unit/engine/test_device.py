"""Limits of a machine or a setting are reported in one sentence at start. GPUs are mocked: none is needed."""

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import ModelSpec
from tandem.engine.device import check_weights, choose_kernels, parse_device, parse_dtype, parse_kv_dtype
from tandem.engine.memory import GIB, kv_cache_bytes, naming_the_setting
from tandem.engine.models.load_spec import parse_spec, quantized_at_load
from tandem.protocol.errors import InvalidArgument
from tests.factories import FAMILIES, tiny_engine_config

GPU = torch.device("cuda", 0)


def play_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Mocks one GPU of this capability with 40 of 80 GiB free, 10 of them kept by PyTorch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (40 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 10 * GIB)


def model(**changes: object) -> ModelSpec:
    return parse_spec(FAMILIES["llama3"] | changes, {})


def config(**changes: object) -> EngineConfig:
    return tiny_engine_config(Path("nowhere"), **changes)


def test_a_gpu_that_is_not_there_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu(monkeypatch)
    assert parse_device("cuda") == GPU
    with pytest.raises(InvalidArgument, match="'cuda:1' is not there: PyTorch sees 1 CUDA devices; use cpu"):
        parse_device("cuda:1")


@pytest.mark.parametrize(("capability", "words"), [((7, 5), "7.5"), ((6, 1), "6.1")])
def test_a_gpu_that_is_too_old_is_refused(
    capability: tuple[int, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_gpu(monkeypatch, capability)
    with pytest.raises(InvalidArgument, match=f"compute capability {words}; the kernels need 8.0 or newer; use cpu"):
        parse_device("cuda")


def test_a_gpu_without_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu(monkeypatch)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        InvalidArgument, match=r"need triton, which is not installed; pip install 'tandem-serving\[gpu\]'"
    ):
        parse_device("cuda")
    assert parse_device("cpu").type == "cpu"


def test_a_checkpoint_of_an_unsupported_dtype_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'float8_e4m3fn' is not supported; use auto, float32, bfloat16, float16"):
        parse_dtype(config(), GPU, model(torch_dtype="float8_e4m3fn"))


def test_a_head_dim_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu(monkeypatch)
    with pytest.raises(InvalidArgument, match="has head dim 48; on GPUs 64, 80, 96, 128, 192, 256, 512 are served"):
        choose_kernels(config(), model(head_dim=48), GPU, torch.bfloat16, 128, kv_dtype=torch.bfloat16)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_8_bit_kv_on_gpus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu(monkeypatch, (8, 9))
    dtype = parse_kv_dtype(config(kv_cache_dtype=name), GPU, model())
    assert dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[name]


def test_fp8_weights_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, int8 = (quantized_at_load(model(), name) for name in ("fp8", "int8"))
    play_gpu(monkeypatch, (8, 6))
    with pytest.raises(InvalidArgument, match=r"quantization: fp8 needs a GPU of compute capability 8\.9, this one"):
        check_weights(GPU, fp8)
    check_weights(GPU, int8)
    check_weights(torch.device("cpu"), fp8)
    play_gpu(monkeypatch, (8, 9))
    check_weights(GPU, fp8)


def test_8_bit_floating_point_kv_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu(monkeypatch, (8, 0))
    with pytest.raises(
        InvalidArgument, match=r"fp8 needs a GPU of compute capability 8\.9, this one has 8\.0; use int8"
    ):
        parse_kv_dtype(config(kv_cache_dtype="fp8"), GPU, model())
    with pytest.raises(InvalidArgument, match="kv_cache_dtype: fp8 is served on GPUs only; use int8"):
        parse_kv_dtype(config(kv_cache_dtype="fp8"), torch.device("cpu"), model())


class TestPrefillAttention:
    """The choice, and its log text."""

    @pytest.fixture(autouse=True)
    def _flash(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cute = ModuleType("flash_attn.cute")
        cute.flash_attn_varlen_func = None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)

    def choose(self, page_tokens: int = 128, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> str:
        from tandem.engine.kernels.attention.prefill_attention import AttentionKind, choose_prefill_attention

        kinds = [AttentionKind(AttentionShape(4, 2, dim, 0.1)) for dim in (64, head_dim)]
        return type(choose_prefill_attention(GPU, dtype, kinds, page_tokens, pdl=False)).__name__

    def test_the_fast_page_size_is_not_warned_of(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        play_gpu(monkeypatch)
        with caplog.at_level(logging.WARNING):
            assert self.choose() == "FlashPrefill"
        assert not caplog.records

    def test_a_slow_page_size_names_the_better_one(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        play_gpu(monkeypatch)
        assert self.choose(page_tokens=64) == "FlashPrefill"
        (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "64 tokens" in record.getMessage()
        assert "128 is the fast size" in record.getMessage()

    @pytest.mark.parametrize(
        ("capability", "settings", "words"),
        [
            ((8, 0), {}, "needs a GPU of compute capability 9.0"),
            ((9, 0), {"dtype": torch.float32}, "bfloat16 and float16 only"),
        ],
    )
    def test_the_fallback_says_why(
        self,
        capability: tuple[int, int],
        settings: dict[str, object],
        words: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        play_gpu(monkeypatch, capability)
        assert self.choose(**settings) == "SdpaPrefill"  # type: ignore[arg-type]
        assert words in caplog.text

    def test_only_layers_of_other_heads_fall_back(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        play_gpu(monkeypatch)
        assert self.choose(head_dim=80) == "FlashPrefill"
        assert "heads of [80] dimensions: PyTorch SDPA" in caplog.text


class TestMemory:
    """Memory of a mocked GPU."""

    def test_the_cache_gets_what_the_fraction_leaves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        play_gpu(monkeypatch)
        # 0.5 · 80 - 10 of weights - 0.75 outside of PyTorch - 4 of steps
        assert kv_cache_bytes(GPU, 0.5, 4 * GIB) == int(25.25 * GIB)
        # 0.9 · 80 would be more than the 40 that are free
        assert kv_cache_bytes(GPU, 0.9, 4 * GIB) == 36 * GIB

    def test_no_room_names_the_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        play_gpu(monkeypatch)
        with pytest.raises(InvalidArgument, match=r"memory_fraction: 0\.1 of .* raise memory_fraction, lower max_step"):
            kv_cache_bytes(GPU, 0.1, 4 * GIB)

    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ],
    )
    def test_running_out_at_start_names_the_settings(
        self, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        play_gpu(monkeypatch)
        words = r"kv_cache_bytes: cuda:0 ran out of memory \(40\.0 of 80 GiB are free\); lower kv_cache_bytes"
        with pytest.raises(InvalidArgument, match=words), naming_the_setting(GPU):
            raise error

    def test_other_errors_are_no_lack_of_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        play_gpu(monkeypatch)
        with pytest.raises(RuntimeError, match="illegal memory access"), naming_the_setting(GPU):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
