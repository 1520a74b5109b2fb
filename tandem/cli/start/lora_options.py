"""Options of `tandem up` for low-rank adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tandem.cluster.config import ClusterConfig


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Options of adapters."""

    lora: Annotated[
        list[str] | None,
        typer.Option(
            "--lora",
            metavar="NAME=PATH",
            help="A low-rank adapter as peft saves it, for requests whose model is NAME; may be given several times.",
        ),
    ] = None
    allow_runtime_lora_updating: Annotated[
        bool,
        typer.Option(
            "--allow-runtime-lora-updating",
            help="Let operators load and unload adapters while the cluster serves, from any folder that the workers can"
            " read. Workers keep memory for --max-loras adapters of --max-lora-rank. Without API keys every client is"
            " an operator.",
        ),
    ] = False
    max_loras: Annotated[int, typer.Option(help="Most adapters.")] = 8
    max_lora_rank: Annotated[int, typer.Option(help="Highest rank of an adapter.")] = 16

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings; InvalidArgument for a name that is empty or given twice."""
        from tandem.protocol.errors import InvalidArgument

        loras: dict[str, Path] = {}
        for given in self.lora or ():
            name, path = named_path(given, "--lora")
            if name in loras:
                raise InvalidArgument("--lora", f"has the name {name!r} twice")
            loras[name] = path
        return replace(
            config,
            loras=tuple(loras.items()),
            runtime_loras=self.allow_runtime_lora_updating,
            max_loras=self.max_loras,
            max_lora_rank=self.max_lora_rank,
        )


def named_path(given: str, option: str) -> tuple[str, Path]:
    """Returns the name and the absolute path of NAME=PATH; InvalidArgument for anything else."""
    from tandem.protocol.errors import InvalidArgument

    name, _, path = given.partition("=")
    if not name or not path or not name.isprintable():
        raise InvalidArgument(option, f"{given!r} is not NAME=PATH")
    return name, Path(path).resolve()
