"""The folder of compiled kernels: in the user's cache, or a temporary one."""

import tempfile
from pathlib import Path

import pytest

from tandem.engine.compiled_folder import compiled_folder


def test_in_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compiled_folder("library")
    assert folder == tmp_path / "tandem" / "kernels" / "library"
    assert folder.is_dir()
    assert compiled_folder("library") == folder, "the next start finds it"


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = compiled_folder("library")
    assert folder.parent == tmp_path
    assert folder.is_dir()
