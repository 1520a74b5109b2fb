"""Libraries that compile at start: kept between starts, and replaced where they fail."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tandem.engine.kernels.attention import prefill_attention
from tandem.engine.kernels.attention.prefill_attention import FlashPrefill, SdpaPrefill, compiled
from tandem.engine.kernels.fallback import failure_of, why_not_imported
from tandem.engine.kernels.libraries import Wanted, keep_compiled
from tandem.engine.kernels.linear import gated_product
from tandem.engine.kernels.linear.gated_product import PlainGated, choose_gated_product

CPU = torch.device("cpu")
_SETTINGS = ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "QUACK_CACHE_DIR")


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"XDG_CACHE_HOME": str(tmp_path)})


def test_libraries_keep_what_they_compile(tmp_path: Path) -> None:
    keep_compiled()
    enabled, flash, quack = (os.environ[name] for name in _SETTINGS)
    assert enabled == "1"
    assert Path(flash).is_relative_to(tmp_path)
    assert Path(quack).is_relative_to(tmp_path)
    assert flash != quack


def test_what_the_environment_says_stands() -> None:
    os.environ.update(dict.fromkeys(_SETTINGS, "0"))
    keep_compiled()
    assert [os.environ[name] for name in _SETTINGS] == ["0", "0", "0"]


def test_a_failure_is_one_line() -> None:
    assert failure_of(lambda: None) == ""
    assert failure_of(Mock(side_effect=TypeError("no key for\nthis"))) == "TypeError: no key for this"


def test_a_library_that_is_there_is_imported() -> None:
    assert why_not_imported("json.decoder", "json") == ""


def test_a_library_that_is_not_there_is_no_reason_to_warn(caplog: pytest.LogCaptureFixture) -> None:
    assert why_not_imported("no_such_library.part", "its-name") == "the package its-name is not installed"
    assert not caplog.messages


@pytest.mark.parametrize("text", ["import json; json.no_such_part", "import no_such_need", "raise SystemError('old')"])
def test_a_library_that_cannot_be_imported_is_warned_of(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken_library.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    reason = why_not_imported("broken_library", "its-name")
    assert reason.startswith("its-name cannot be imported: ")
    assert caplog.messages == [reason]


def test_running_out_of_memory_is_no_failure_of_a_library() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        failure_of(Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))


def test_a_model_of_routed_experts_alone_compiles_no_gated_product() -> None:
    model: Any = SimpleNamespace(hidden_size=64, dense_widths=set(), shared_widths=set())
    assert isinstance(Wanted(model, torch.device("cuda"), torch.bfloat16, 16, pdl=False).gated_product(), PlainGated)


def test_a_product_that_does_not_compile_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fused = SimpleNamespace(compute=Mock(side_effect=TypeError("depends on a ContextVar")))
    monkeypatch.setattr(gated_product, "_why_not_fused", lambda *_: "")
    monkeypatch.setattr(gated_product, "FusedGated", lambda _: fused)
    with caplog.at_level(logging.WARNING, gated_product.__name__):
        assert isinstance(choose_gated_product(CPU, torch.bfloat16, 64, 48, pdl=False), PlainGated)
    (said,) = caplog.messages
    assert "cuBLAS" in said
    assert "quack-kernels: TypeError: depends on a ContextVar" in said


def test_attention_that_does_not_compile_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    flash: Any = Mock(FlashPrefill, compile=Mock(side_effect=ValueError("no such tile")))
    with caplog.at_level(logging.WARNING, prefill_attention.__name__):
        assert isinstance(compiled(flash, [], torch.bfloat16, CPU), SdpaPrefill)
    (said,) = caplog.messages
    assert "flash-attn-4: ValueError: no such tile" in said
    works: Any = Mock(FlashPrefill)
    assert compiled(works, [], torch.bfloat16, CPU) is works
    works.compile.assert_called_once_with([], torch.bfloat16, CPU)
