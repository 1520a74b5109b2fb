"""`tandem quantize` on a tiny model: what it writes and prints, and its sentences for wrong options."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from tests.factories import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_it_says_what_it_wrote(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["quantize", str(folder), str(output), "--scheme", "w8a16", "--method", "rtn", "--no-quality"]
    )
    assert result.exit_code == 0, result.output
    assert "MiB before" in result.output
    assert (output / "config.json").is_file()


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--scheme", "w3"], 2, "error: --scheme: 'w3' is not known"),
        (["--group-size", "48", "--method", "rtn"], 2, "error: --group-size: the model's products have 64, 96 inputs"),
        (["--method", "spqr"], 2, "error: --method: 'spqr' is not known"),
        (["--method", "smoothquant"], 2, "error: --method: smoothquant is for 8-bit activations"),
        (["--text", "/nowhere/text"], 2, "error: --text: /nowhere/text cannot be read"),
        (
            ["--scheme", "fp8", "--group-size", "32", "--method", "rtn"],
            2,
            "error: --group-size: fp8 has one scale for each output",
        ),
    ],
)
def test_wrong_options_get_a_sentence(
    folder: Path, tmp_path: Path, options: list[str], code: int, sentence: str
) -> None:
    result = CliRunner().invoke(app, ["quantize", str(folder), str(tmp_path / "out"), *options])
    assert result.exit_code == code
    assert sentence in result.output
    assert not (tmp_path / "out").exists()
