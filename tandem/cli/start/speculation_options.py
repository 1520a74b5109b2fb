"""Options of `tandem up` for speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tandem.cluster.config import ClusterConfig


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Options of speculative decoding."""

    speculate: Annotated[
        str,
        typer.Option(
            help="Speculative decoding: ngram = verify what followed the last tokens when they occurred before, several"
            " tokens a step where that pays; suffix = also in earlier answers of the tenant; draft = what the"
            " model or heads of --draft propose; off; auto = ngram on a CPU, off on GPUs. Answers are the same."
        ),
    ] = "auto"
    draft: Annotated[
        Path | None,
        typer.Option(
            help="Folder of --speculate draft: a small model with the same tokens, which gets a part of the KV cache's"
            " memory, an EAGLE head, likewise, or Medusa heads; its config.json says which."
        ),
    ] = None

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings."""
        return replace(config, speculate=self.speculate, draft=None if self.draft is None else self.draft.resolve())
