"""`tandem quantize` on a tiny model: what it writes and prints, and its sentences for wrong options."""

from pathlib import Path

import pytest
from gguf import GGMLQuantizationType
from rich.console import Console
from typer.testing import CliRunner

from tandem.cli.main import app
from tandem.cli.quantization import quantize
from tests.factories import write_tiny_model
from tests.unit.engine.weights.test_gguf import write_gguf


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
        (["--method", "rtn", "--text", "/nowhere/text"], 2, "error: --text: rtn reads no text"),
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


def test_a_gguf_file_of_codes_is_refused_before_it_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tandem.engine.weights.gguf.prepare_model", lambda *_args, **_named: pytest.fail("it is loaded")
    )
    file = write_gguf(tmp_path / "codes.gguf", kind_of=lambda _: GGMLQuantizationType.Q8_0)
    result = CliRunner().invoke(app, ["quantize", str(file), str(tmp_path / "out")])
    assert result.exit_code
    assert "is quantized already (Q8_0); quantize the model it was made from" in " ".join(result.output.split())


class Characters:
    """A tokenizer of one token a character."""

    def __init__(self, _folder: Path) -> None:
        pass

    def encode(self, text: str) -> list[int]:
        return [ord(character) % 160 for character in text]


def test_the_table_compares_two_folders(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.text.tokenizer.Tokenizer", Characters)
    monkeypatch.setattr(quantize, "_QUALITY_SAMPLES", 2)
    monkeypatch.setattr(quantize, "_QUALITY_TOKENS", 12)
    console = Console(width=100)
    with console.capture() as captured:
        quantize._print_quality(console, folder, write_tiny_model(tmp_path / "other", seed=1), "cpu")
    lines = captured.get().splitlines()
    phases = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in lines if line.startswith("│")}
    assert phases == {"prefill": "12", "decode": "10"}
    assert "docs/quantization.md says how to read the table" in captured.get()


def test_calibration_reads_the_text_that_is_given(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.text.tokenizer.Tokenizer", Characters)
    text = tmp_path / "text"
    text.write_text("a text to calibrate on " * 40)
    options = ["--text", str(text), "--samples", "8", "--tokens", "64", "--no-quality"]
    result = CliRunner().invoke(app, ["quantize", str(folder), str(tmp_path / "out"), *options])
    assert result.exit_code == 0, result.output
    assert "groups of 32" in result.output
    result = CliRunner().invoke(app, ["quantize", str(folder), str(tmp_path / "again"), *options, "--samples", "80"])
    assert result.exit_code == 2
    assert "error: --samples: the text has 920 tokens" in result.output
