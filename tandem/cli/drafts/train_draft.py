"""`tandem train-draft`: trains Medusa or EAGLE heads that propose draft tokens for `--speculate draft --draft PATH`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.help_text import further_option
from tandem.cli.plain_errors import plain_errors
from tandem.cli.progress import progress_bars

if TYPE_CHECKING:
    from rich.console import Console

    from tandem.engine.draft_training.train_draft import Trained

training_option = further_option("Heads and training")
_PROMPT_TOKENS = 256
"""Maximum tokens of a paragraph that serves as a prompt; longer ones are cut."""
_EPOCHS = {"medusa": 3, "eagle": 24}
"""Default number of epochs over the answers, by kind (docs/decisions/speculative_decoding.md)."""
_PROMPT_CHARACTERS = 40
"""Minimum characters of a prompt. Shorter paragraphs, such as headings, are skipped."""


@plain_errors
def train_draft(
    model: Annotated[Path, typer.Argument(help="Folder in Hugging Face layout, GGUF file, or Hub id.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder to write, which must not exist.")],
    kind: Annotated[
        str,
        typer.Option(
            help="medusa = heads that each guess one token further ahead; eagle = one decoder layer that guesses token"
            " by token, with KV of its own."
        ),
    ] = "medusa",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that the model answers and heads learn from.")] = 200_000,
    heads: Annotated[
        int, training_option(min=1, max=7, help="Heads; of eagle the guesses in a row that are judged.")
    ] = 3,
    layers: Annotated[int, training_option(min=1, help="Layers of each Medusa head.")] = 1,
    vocabulary: Annotated[
        int, training_option(min=1, help="Tokens that heads can guess: those that the answers have most often.")
    ] = 8192,
    epochs: Annotated[
        int | None, training_option(min=1, help="Passes over the answers; default: 3, of eagle 24.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="File of text whose paragraphs are the prompts; default: a built-in one, in English."),
    ] = None,
    temperature: Annotated[float, training_option(min=0.0, help="Temperature of the answers.")] = 0.7,
    seed: Annotated[int, training_option(min=0, help="Seed of answers and training.")] = 0,
    device: Annotated[str, typer.Option(help="Device that computes: cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[
        str, training_option(help="Of the model: auto, float32, bfloat16 or float16; heads learn in float32.")
    ] = "auto",
    threads: Annotated[int | None, training_option(min=1, help="CPU threads; default: all cores.")] = None,
) -> None:
    """Train heads that predict a model's next tokens, on answers of the model itself, for --speculate draft."""
    from rich.console import Console

    from tandem.cli.models.hub_model import hub_model
    from tandem.engine.config import EngineConfig
    from tandem.engine.draft_training.train_draft import TrainingConfig
    from tandem.engine.draft_training.train_draft import train_draft as train
    from tandem.engine.weights.gguf import prepare_model

    console = Console()
    passes = _EPOCHS.get(kind, 1) if epochs is None else epochs
    recipe = TrainingConfig(kind, tokens, heads, layers, vocabulary, passes, temperature, seed)
    with progress_bars(console) as report:
        hub = hub_model(model)
        folder = prepare_model(model if hub is None else hub.download(report), progress=report)
        config = EngineConfig.of(folder, device=device, dtype=dtype, threads=threads)
        trained = train(config, out, prompts_of(folder, text), recipe, report)
    _report(console, out, trained)


def _report(console: Console, out: Path, trained: Trained) -> None:
    size = sum(file.stat().st_size for file in out.iterdir()) / 2**20
    console.print(
        f"wrote {out}: {size:,.1f} MiB, {trained.tokens:,} tokens learned, loss {trained.losses[0]:.3f} in the first"
        f" pass and {trained.losses[-1]:.3f} in the last",
        highlight=False,
        soft_wrap=True,
    )
    gains = ", ".join(f"{gain:.2f} with {drafts}" for drafts, gain in enumerate(trained.tokens_a_step, 1))
    console.print(
        f"tokens a step on {trained.held_out_tokens:,} tokens held out: {gains} drafts at most; serve with"
        f" --speculate draft --draft {out}",
        highlight=False,
        soft_wrap=True,
    )


def prompts_of(folder: Path, text: Path | None) -> list[list[int]]:
    """Return the paragraphs of `text` as token ids, formatted as user messages if the model has a chat template.

    Without `text`, the built-in text is used. Raises InvalidArgument for a text that cannot be read.
    """
    from router.text.chat_template import ChatTurn
    from router.text.tokenizer import Tokenizer
    from tandem.cli.quantization.sample_text import sample_text
    from tandem.protocol.errors import InvalidArgument

    try:
        read = sample_text("calibration") if text is None else text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument("text", f"{text} cannot be read: {error}.") from error
    tokenizer = Tokenizer(folder)
    paragraphs = [paragraph.strip() for paragraph in read.split("\n\n")]
    encoded = [
        tokenizer.encode(paragraph)[:_PROMPT_TOKENS] for paragraph in paragraphs if len(paragraph) >= _PROMPT_CHARACTERS
    ]
    cut = [tokenizer.decode(token_ids) for token_ids in encoded]
    if not tokenizer.template_source:
        return [tokenizer.encode(prompt) for prompt in cut]
    return [tokenizer.encode_chat([ChatTurn("user", prompt)]) for prompt in cut]
