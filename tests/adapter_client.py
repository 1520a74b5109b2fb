"""Loads and unloads adapters in a running cluster, and compares its answers with those of merged models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tandem.engine.model_runner import ModelRunner
from tests.adapters import ATTENTION, TinyAdapter
from tests.factories import greedy_answer, tiny_engine_config

ANSWER = 12
PROMPT = tuple(3 + 7 * number % 101 for number in range(70))
"""A prompt of four full pages and a part of a fifth."""
_TIMEOUT_S = 60.0


@dataclass
class AdapterClient:
    """Writes adapters for a tiny model into `folder`, and operates the cluster that serves the model."""

    cluster: Any
    family: str
    vocab_size: int
    folder: Path

    def write(self, name: str, seed: int) -> tuple[Path, list[int]]:
        """Write an adapter; return its folder, and the answer of the model into which it is merged."""
        changes = {"vocab_size": self.vocab_size}
        adapter = TinyAdapter(self.family, seed, modules=ATTENTION, changes=changes)
        merged = adapter.merged(self.folder / f"{name}-merged")
        runner = ModelRunner.load(tiny_engine_config(merged, max_step_tokens=32, threads=1))
        return adapter.write(self.folder / name), greedy_answer(runner, PROMPT, ANSWER)

    def load(self, name: str, path: Path) -> httpx.Response:
        return self._post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})

    def unload(self, name: str) -> httpx.Response:
        return self._post("/unload_lora_adapter", json={"lora_name": name})

    def ask(self, model: str) -> httpx.Response:
        """Send the prompt with greedy sampling."""
        body = {"prompt": PROMPT, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self._post("/completions", json=body | {"model": model})

    def answer(self, model: str) -> Sequence[int]:
        """Return the token ids of an answer."""
        reply = self.ask(model)
        assert reply.status_code == 200, reply.text
        tokens: list[int] = reply.json()["choices"][0]["token_ids"]
        return tokens

    def listed(self) -> list[str]:
        """Return the names in /v1/models after the model's own."""
        return [card["id"] for card in httpx.get(self._url("/models"), timeout=_TIMEOUT_S).json()["data"]][1:]

    def _post(self, path: str, json: dict[str, Any]) -> httpx.Response:
        return httpx.post(self._url(path), json=json, timeout=_TIMEOUT_S)

    def _url(self, path: str) -> str:
        return f"http://{self.cluster.http_address}/v1{path}"
