"""`tandem models`: the models on this machine, downloads from the Hub, and the GPUs that hold a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tandem.cli.help_text import GroupedCommands, GroupedHelp
from tandem.cli.plain_errors import plain_errors
from tandem.cli.progress import each_part, progress_bars

if TYPE_CHECKING:
    from tandem.capacity.plan.what_fits import Fit, Width
    from tandem.cli.models.hub_model import HubModel
    from tandem.engine.config.model import ModelSpec

GIB = 1 << 30
_HUB_ID = "ORG/NAME, ORG/NAME@REVISION or ORG/NAME:FILE.gguf on the Hugging Face Hub."

models_commands = typer.Typer(
    help="List, download, remove and describe models.",
    no_args_is_help=True,
    rich_markup_mode=None,
    cls=GroupedCommands,
)


@models_commands.command(name="list", cls=GroupedHelp)
@plain_errors
def list_models() -> None:
    """List the models on this machine, with their sizes, and why one cannot be served."""
    from tandem.cli.models.stored_models import stored_models

    table = _table("MODEL", "GIB", "FROM", "NOTE")
    for model in stored_models():
        table.add_row(model.name, f"{model.bytes / GIB:.2f}", model.origin, model.problem)
    _print(table)


@models_commands.command(cls=GroupedHelp)
@plain_errors
def pull(model: Annotated[str, typer.Argument(metavar="MODEL", help=_HUB_ID)]) -> None:
    """Download a model into huggingface_hub's cache, from which `tandem serve MODEL` then starts.

    HF_TOKEN opens private and gated repositories, HF_HOME is the folder of the cache, HF_ENDPOINT another server.
    """
    from tandem.cli.models.hub_model import hub_model
    from tandem.protocol.errors import InvalidArgument

    hub = hub_model(Path(model))
    if hub is None:
        local = "is a folder or file, which `tandem serve` takes as it is"
        raise InvalidArgument("MODEL", f"{model} {local if Path(model).exists() else f'is not {_HUB_ID[:-1]}'}")
    path = _fetch(hub)
    print(f"{model} is in {path}\nserve it: tandem serve {model}")


@models_commands.command(cls=GroupedHelp)
@plain_errors
def rm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="ORG/NAME, ORG/NAME@REVISION or a converted model.")],
) -> None:
    """Remove a model from the cache: a repository with all its files, one revision of it, or a converted GGUF model."""
    from tandem.cli.models.stored_models import remove

    print(f"{model} is removed; {remove(model) / GIB:.2f} GiB are free again")


@models_commands.command(cls=GroupedHelp)
@plain_errors
def show(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, GGUF file, Hub id or shape; default: the small model.")
    ] = "",
    *,
    tokens: Annotated[
        int, typer.Option(min=1, help="Prompt and answer of the longest request, which has to fit too.")
    ] = 8192,
) -> None:
    """Describe a model, and say which GPUs hold it with weights of 16, 8 and 4 bits.

    Of a model on the Hub, its configuration alone is downloaded.
    """
    from tandem.capacity.plan.what_fits import what_fits
    from tandem.capacity.planner.demand import Demand
    from tandem.cli.models.default_model import NAME
    from tandem.engine.model_summary import model_summary

    name = model or NAME
    spec = _spec(model)
    tokens = min(tokens, spec.max_context)
    widths = list(what_fits(name, spec, Demand(1.0, tokens, 0.0)))
    print(f"{name}, up to {spec.max_context:,} tokens")
    for line in model_summary(spec, 2):
        print(f"  {line}")
    print(f"\nthe fewest GPUs of a worker for the model and a request of {tokens:,} tokens, and the tokens it holds")
    _print(_fits_table(widths))
    print(_host_line(spec))


def _spec(model: str) -> ModelSpec:
    """Return the spec of a model that a user names; empty = the default model. Raises ModelError."""
    from tandem.cli.models.default_model import NAME, find_default_model
    from tandem.cli.models.hub_model import hub_model
    from tandem.engine.models.load_spec import load_spec
    from tandem.engine.models.shapes import shape_config, shape_names
    from tandem.engine.weights.gguf import gguf_spec
    from tandem.engine.weights.gguf_parts import gguf_files

    path = Path(model)
    if not path.exists() and model in shape_names():
        return shape_config(model)
    if model in {"", NAME} and not (model and path.exists()):
        path = find_default_model()
    elif (hub := hub_model(path)) is not None:
        path = hub.configuration()
    files = gguf_files(path)
    return gguf_spec(files) if files and files[0].is_file() else load_spec(path)


def _fits_table(widths: list[Width]) -> Table:
    table = _table(
        "GPU", *(f"--quantization {width.quantization}" if width.quantization else "as stored" for width in widths)
    )
    table.add_row("weights", *(f"{width.weight_bytes / GIB:.2f} GiB" for width in widths))
    for gpu in widths[0].fits:
        table.add_row(gpu, *(_fit(width.fits[gpu]) for width in widths))
    return table


def _fit(fit: Fit | None) -> str:
    if fit is None:
        return "does not fit"
    return f"{fit.gpus} GPU{'s' if fit.gpus > 1 else ''}, {fit.kv_tokens:,.0f}"


def _host_line(spec: ModelSpec) -> str:
    """Return a line about serving the model on this host's CPU, in float32."""
    import torch

    from tandem.engine.memory import free_bytes
    from tandem.engine.model_sizes import matrix_bytes

    needed, free = matrix_bytes(spec, 4, on_cpu=True) / GIB, free_bytes(torch.device("cpu")) / GIB
    fits = "fits" if needed < free else "does not fit"
    return f"on this host's CPU: {needed:.2f} GiB a worker; {fits} into the {free:.1f} GiB of memory that are free"


def _fetch(hub: HubModel) -> Path:
    """Download a model, with a progress bar on a terminal, otherwise with a line for each 1/20."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        return hub.download(each_part(lambda text, _: print(f"fetching {hub.name}: {text}", flush=True)))
    with progress_bars(console) as report:
        return hub.download(lambda _, done: report(f"fetching {hub.name}", done))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print(table: Table) -> None:
    import sys

    from rich.console import Console

    from tandem.cli.observe.status import WIDE

    (Console() if sys.stdout.isatty() else Console(width=WIDE)).print(table)
