"""The description of a route's JSON body, for the OpenAPI page."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import BaseModel

REFERENCE = "#/components/schemas/{model}"
"""The place of a model in the page."""


# Describing the models takes a third of the CPU time of a start, and tests start a router each.
@cache
def json_body(*models: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that takes any of `models`, which it parses itself."""
    schemas = [model.model_json_schema(ref_template=REFERENCE) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
