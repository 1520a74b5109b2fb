"""Options of `tandem up` for low-rank adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cluster.config import ClusterConfig


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
    max_loras: Annotated[int, typer.Option(help="Most adapters.")] = 16
    max_lora_rank: Annotated[int, typer.Option(help="Highest rank of an adapter.")] = 64

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings; InvalidArgument for a name that is empty or given twice."""
        from wire.errors import InvalidArgument

        loras: dict[str, Path] = {}
        for given in self.lora or ():
            name, _, path = given.partition("=")
            if not name or not path or not name.isprintable():
                raise InvalidArgument("--lora", f"{given!r} is not NAME=PATH")
            if name in loras:
                raise InvalidArgument("--lora", f"has the name {name!r} twice")
            loras[name] = Path(path).resolve()
        return replace(config, loras=tuple(loras.items()), max_loras=self.max_loras, max_lora_rank=self.max_lora_rank)
