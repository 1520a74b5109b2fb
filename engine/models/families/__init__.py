"""The model families: each file of this folder is one, and is found by being there."""

import importlib
import pkgutil
from functools import cache
from typing import Any

from engine.config.model import ModelSpec
from engine.models.families.family import Family, Json
from engine.models.parameters import Parameters, Place
from wire.errors import ModelError

_SHARED = {"family", "rows"}
"""Files of the folder that are no family."""


@cache
def families() -> tuple[Family, ...]:
    """Returns the families, in the order of their files' names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED)
    return tuple(importlib.import_module(f"{__name__}.{name}").FAMILY for name in names)


def family_of(config: Json) -> Family:
    """Returns the family of a config.json, by its `architectures`, or by its `model_type` where it has none.

    ModelError names the architecture and lists the supported ones.
    """
    named: list[Any] = list(config.get("architectures") or [])
    kind = config.get("model_type")
    for family in families():
        if set(named) & set(family.architectures) or (not named and kind in family.model_types):
            return family
    supported = sorted(name for family in families() for name in family.architectures)
    raise ModelError(
        f"architecture {named[0] if named else kind} (model_type {kind!r}) is not supported; "
        f"supported are {', '.join(supported)}."
    )


def places_of(spec: ModelSpec, parameters: Parameters) -> dict[str, Place]:
    """Returns the destination of each tensor of a checkpoint of this model by its name."""
    return family_of({"architectures": [spec.architecture]}).places(spec, parameters)
