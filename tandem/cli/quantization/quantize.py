"""`tandem quantize`: writes a model with 4-bit, 8-bit or sparse weights, and measures the loss in quality."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.plain_errors import plain_errors
from tandem.cli.progress import progress_bars

if TYPE_CHECKING:
    from rich.console import Console

    from tandem.engine.quantizer.quantize import Quantized

_QUALITY_SAMPLES, _QUALITY_TOKENS = 32, 256
"""Number and length of the samples that measure quality.

They give the KL divergence to within a few percent, in about a minute on a CPU.
"""


@plain_errors
def quantize(
    model: Annotated[Path, typer.Argument(help="Folder in Hugging Face layout, GGUF file, or Hub id.")],
    output: Annotated[Path, typer.Argument(help="Folder to write, which must not exist.")],
    *,
    scheme: Annotated[
        str,
        typer.Option(
            help="w4a16, w4a16-asym, w8a16 (weights alone), w8a8 or fp8 (activations too, in 8 bits), or none, which "
            "keeps the dtype and is for --sparsity."
        ),
    ] = "w4a16",
    method: Annotated[
        str,
        typer.Option(
            help="rtn rounds to nearest, without calibration; gptq and awq lose less, above all with 4 bits; "
            "smoothquant is for w8a8 and fp8."
        ),
    ] = "gptq",
    group_size: Annotated[
        int | None,
        typer.Option(min=1, help="Inputs that share a scale, with 4 bits; default: 128, 64 or 32, as divides all."),
    ] = None,
    sparsity: Annotated[
        str | None,
        typer.Option(
            help="2:4 sets two of each four weights to zero: with gptq those that add the least error, else the "
            "smallest."
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="File of text to calibrate on, as the model will see; default: a built-in one.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Pieces of the text to calibrate on.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a piece.")] = 512,
    device: Annotated[str, typer.Option(help="Device that computes: cpu, cuda or cuda:N.")] = "cpu",
    quality: Annotated[
        bool, typer.Option("--quality/--no-quality", help="Compare predictions with the model's own afterwards.")
    ] = True,
) -> None:
    """Quantize a model's weights into a compressed-tensors checkpoint, which vLLM and transformers load too."""
    from rich.console import Console

    from tandem.cli.models.hub_model import hub_model
    from tandem.engine.device import parse_device
    from tandem.engine.quantizer.quantize import QuantizationRecipe
    from tandem.engine.quantizer.quantize import quantize as write_quantized
    from tandem.engine.quantizer.scheme import parse_scheme
    from tandem.engine.weights.gguf import prepare_model, refuse_codes
    from tandem.protocol.errors import InvalidArgument

    if text is not None and method == "rtn":
        raise InvalidArgument("text", "rtn reads no text; choose another --method.")
    console = Console()
    recipe = QuantizationRecipe(parse_scheme(scheme), method, group_size, sparsity)
    target = parse_device(device)
    with progress_bars(console) as report:
        hub = hub_model(model)
        path = model if hub is None else hub.download(report)
        refuse_codes(path)
        folder = prepare_model(path, progress=report)
        read = [] if method == "rtn" else _calibration_samples(folder, text, samples, tokens)
        written = write_quantized(folder, output, recipe, read, device=target, progress=report)
    console.print(_summary(written), highlight=False)
    if quality:
        _print_quality(console, folder, output, device)


def _calibration_samples(folder: Path, text: Path | None, samples: int, tokens: int) -> list[Sequence[int]]:
    """Return `samples` pieces of `tokens` token ids each from `text`; None = from the built-in calibration text.

    Raises InvalidArgument for a text that is too short or cannot be read.
    """
    from router.text.tokenizer import Tokenizer
    from tandem.cli.quantization.sample_text import sample_text, token_samples
    from tandem.protocol.errors import InvalidArgument

    try:
        read = sample_text("calibration") if text is None else text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument("text", f"{text} cannot be read: {error}.") from error
    return token_samples(Tokenizer(folder).encode, read, samples, tokens)


def _summary(written: Quantized) -> str:
    group = "" if written.group is None else f", groups of {written.group}"
    before, after = (size / 2**20 for size in (written.read_bytes, written.written_bytes))
    return f"wrote {written.folder}: {after:,.0f} MiB, {before:,.0f} MiB before{group}"


def _print_quality(console: Console, folder: Path, output: Path, device: str) -> None:
    """Print how the predictions of the model in `output` differ from those in `folder`.

    The text is the built-in evaluation text, which is never used for calibration.
    """
    from router.text.tokenizer import Tokenizer
    from tandem.cli.quantization.quality_view import quality_table
    from tandem.cli.quantization.sample_text import sample_text, text_hash, token_samples
    from tandem.engine.config import EngineConfig
    from tandem.engine.quality.loading import load_for_comparison
    from tandem.engine.quality.teacher_forced import COMPANY, compare
    from tandem.engine.weights.checkpoint import check_model
    from tandem.protocol.errors import ModelError

    try:
        check_model(output)
    except ModelError as error:
        console.print(f"its quality is not measured, as Tandem cannot serve it: {error.message}", highlight=False)
        return
    text = sample_text("evaluation")
    samples = token_samples(Tokenizer(folder).encode, text, _QUALITY_SAMPLES, _QUALITY_TOKENS)
    with progress_bars(console) as report:
        before, after = (
            load_for_comparison(EngineConfig.of(model_folder, device=device), COMPANY * _QUALITY_TOKENS, report)
            for model_folder in (folder, output)
        )
        comparison = compare(before, after, samples, lambda done: report("comparing predictions", done))
    console.print(quality_table(comparison))
    console.print(f"text {text_hash(text)}; docs/quantization.md says how to read the table", highlight=False)
