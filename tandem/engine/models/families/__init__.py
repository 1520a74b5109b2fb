"""The model families; each module here and in the sub-packages, except the shared ones, is one.

Families are found automatically.
"""

import importlib
import pkgutil
from functools import cache
from typing import Any

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.families.family import Family, Json
from tandem.engine.models.parameters import Parameters
from tandem.engine.models.slots import ParameterSlot, with_separate_experts
from tandem.protocol.errors import ModelError

_SHARED = {"family", "rows"}
"""The modules of this package that define no family."""


@cache
def families() -> tuple[Family, ...]:
    """Return all families, in the order of their module names."""
    modules = [module for module in pkgutil.walk_packages(__path__, f"{__name__}.") if not module.ispkg]
    names = sorted(module.name for module in modules if module.name.rpartition(".")[2] not in _SHARED)
    return tuple(importlib.import_module(name).FAMILY for name in names)


def family_of(config: Json) -> Family:
    """Return the family of a config.json, which is found by `architectures` or, if that is missing, by `model_type`.

    Raises ModelError, which names the architecture and lists the supported ones.
    """
    match = next((family for family in families() if _matches(family, config)), None)
    if match is not None:
        return match
    named, kind = list(config.get("architectures") or ()), config.get("model_type")
    supported = sorted({name.partition("For")[0] for family in families() for name in family.architectures})
    raise ModelError(
        f"architecture {named[0] if named else kind} (model_type {kind!r}) is not supported; "
        f"supported are {', '.join(supported)}."
    )


def is_supported(config: Json) -> bool:
    """Return True if a family supports this config.json."""
    return any(_matches(family, config) for family in families())


def slots_of(spec: ModelSpec, parameters: Parameters) -> dict[str, ParameterSlot]:
    """Return the destination of each tensor of a checkpoint of this model, by the tensor's name."""
    slots = family_of({"architectures": [spec.architecture]}).slots(spec, parameters)
    return with_separate_experts(spec, parameters, slots) if spec.separate_experts else slots


def _matches(family: Family, config: Json) -> bool:
    named: list[Any] = list(config.get("architectures") or ())
    return bool(set(named) & set(family.architectures)) or (
        not named and config.get("model_type") in family.model_types
    )
