"""The configuration of one engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.settings.engine import EngineSettings
from tandem.settings.model import ModelSettings


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineSettings):
    """The settings of an engine, the model that it loads, and the values that its worker adds."""

    served: ModelSettings
    cuda_graphs: bool = True
    """True to replay steps on a GPU as CUDA graphs where one fits; False only to measure the benefit of graphs."""
    draft_graphs: bool = False
    """True to capture CUDA graphs of steps that verify draft tokens.

    Only workers with speculative decoding need these graphs.
    """
    mtp: bool = False
    """True to load the multi-token prediction layer of the model's checkpoint, which proposes draft tokens.

    It excludes `draft`.
    """
    keep_hidden: bool = False
    """True to keep the hidden states of rows that sample a token even without `draft`, to train heads."""

    @classmethod
    def of(cls, model: Path, **fields: Any) -> "EngineConfig":
        """Return the configuration of an engine for a model folder; see `with_fields`."""
        return cls(ModelSettings(model)).with_fields(**fields)
