"""The HTTP routes `/version` and `/v1/models`, the latter in the form of OpenAI and vLLM, or in that of Anthropic."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse

from router.api.anthropic.api_key import MODELS_PATH
from router.api.route_groups import Group
from router.config import RouterConfig
from router.requests.dispatch import Dispatcher
from router.requests.validation import find_adapter
from tandem.version import installed_version

_METHODS = ["GET", "HEAD"]
_ANTHROPIC = "anthropic-version"
"""A header that all clients of Anthropic's API send and that other clients do not send."""


def add_models(app: FastAPI, config: RouterConfig, dispatcher: Dispatcher) -> None:
    """Add GET and HEAD routes for the model list, for one model, and for /version."""
    started = int(time.time())

    def card(name: str) -> dict[str, Any]:
        served = dispatcher.pool.model
        adapter = find_adapter(name, config, served)
        root, parent = (str(config.served.model), None) if adapter is None else (adapter.path, config.served.name)
        return model_card(name, root, started, served.facts.max_context if served else None, parent)

    async def models(request: Request) -> JSONResponse:
        """List the served model, its other names and its adapters, in the form of OpenAI's or Anthropic's API."""
        served = dispatcher.pool.model
        adapters = () if served is None else (adapter.name for adapter in served.facts.adapters)
        cards = [card(name) for name in (*config.served.names, *adapters)]
        if _ANTHROPIC in request.headers:
            return JSONResponse(_anthropic_list([_anthropic_model(entry) for entry in cards]))
        return JSONResponse({"object": "list", "data": cards})

    async def model(request: Request, name: str) -> JSONResponse:
        """Return one entry of the list."""
        entry = card(name)
        return JSONResponse(_anthropic_model(entry) if _ANTHROPIC in request.headers else entry)

    async def tandem_version() -> JSONResponse:
        """Return the version of Tandem."""
        return JSONResponse({"version": installed_version()})

    for path, answer in (
        (MODELS_PATH, models),
        (f"{MODELS_PATH}/{{name:path}}", model),
        ("/version", tandem_version),
    ):
        app.add_api_route(path, answer, methods=_METHODS, tags=[Group.MODELS])


def model_card(
    name: str, root: str, created: int, max_context: int | None, parent: str | None = None
) -> dict[str, Any]:
    """Return one entry of /v1/models.

    As in vLLM, `root` is the folder of the model, where load generators on this host find the tokenizer; for an adapter
    it is the adapter's folder, and `parent` is its base model. `max_model_len` is the context in tokens, None until a
    worker has loaded the model.
    """
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tandem",
        "root": root,
        "parent": parent,
        "max_model_len": max_context,
        "permission": [_permission(name, created)],
    }


def _anthropic_model(card: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of /v1/models in the form of Anthropic's API."""
    created = datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": card["id"], "display_name": card["id"], "created_at": created}


def _anthropic_list(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return `entries` in Anthropic's form of a list, as its only page."""
    return {"data": entries, "has_more": False, "first_id": entries[0]["id"], "last_id": entries[-1]["id"]}


def _permission(name: str, created: int) -> dict[str, Any]:
    """Return OpenAI's permission object: every client may use the model, none may change it."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
