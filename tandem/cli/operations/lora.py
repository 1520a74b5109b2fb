"""`tandem lora`: loads, unloads and lists the low-rank adapters of a running cluster."""

from typing import Annotated

import typer

from tandem.cli.connection.options import ControllerOptions
from tandem.cli.help_text import GroupedCommands, GroupedHelp, with_help_all
from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors

lora_commands = typer.Typer(
    help="Load, unload and list adapters (LoRA) of a running cluster.",
    no_args_is_help=True,
    rich_markup_mode=None,
    cls=GroupedCommands,
)


@lora_commands.command(cls=GroupedHelp)
@with_help_all
@plain_errors
@option_groups
def load(
    adapter: Annotated[
        str, typer.Argument(metavar="NAME=PATH", help="The model name for requests, and the folder on all workers.")
    ],
    *,
    controller: ControllerOptions,
) -> None:
    """Load an adapter into all workers while they serve; they need --allow-runtime-lora-updating."""
    import asyncio

    from tandem.settings.parsing import named_path

    name, path = named_path("NAME=PATH", adapter)
    loaded = asyncio.run(controller.client().load_adapter(name, str(path)))
    print(f"{loaded.name} is loaded (hash {loaded.identity})")


@lora_commands.command(cls=GroupedHelp)
@with_help_all
@plain_errors
@option_groups
def unload(
    name: Annotated[str, typer.Argument(help="The adapter's name, as in `tandem lora list`.")],
    *,
    controller: ControllerOptions,
) -> None:
    """Unload an adapter: no new request can name it, running ones finish."""
    import asyncio

    asyncio.run(controller.client().unload_adapter(name))
    print(f"{name} is unloaded")


@lora_commands.command(name="list", cls=GroupedHelp)
@with_help_all
@plain_errors
@option_groups
def list_adapters(*, controller: ControllerOptions) -> None:
    """List the adapters that requests may name, with their hashes and folders."""
    import asyncio

    for adapter in asyncio.run(controller.client().adapters()):
        print(f"{adapter.name}  {adapter.identity}  {adapter.path}")
