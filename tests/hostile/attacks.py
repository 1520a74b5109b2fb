"""What the hostile tenant does: each attack is a function of the scene that returns when it has ended."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.adapters import write_adapter
from tests.hostile.http2 import FLOODS
from tests.hostile.scene import TIMEOUT_S, Scene, at_once, until

FLOOD_S = 10.0
"""The length of a flood of frames; others end by themselves."""
CALLS = 4
"""Calls at once of an attack."""
STOPPED_S = 40.0
"""The length of a suspension, which is longer than the time after which a process counts as hung."""
RESTART_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack by its name."""

    name: str
    run: Callable[[Scene], object]
    kills: bool = False
    """True if processes of the cluster end or restart by its nature."""
    disconnects: bool = False
    """True if connections of clients break by its nature, so that they have to try again."""


def answers_in_a_format(scene: Scene, **wanted: Any) -> None:
    """Send several calls at once that want an answer in a format."""
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 64, **wanted}
    at_once([partial(scene.post, body)] * CALLS)


def abandoned_regex(scene: Scene) -> None:
    """Leave calls with an expensive pattern as soon as they are sent."""
    body = json.dumps({"prompt": "x", "guided_regex": "a?" * 120_000}).encode()
    host, port = scene.http.split(":")
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {scene.hostile}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    for _ in range(CALLS):
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall(head.encode() + body)
            time.sleep(0.2)


def adapter(scene: Scene, name: str, *, value: float = 1.0, **config: Any) -> Path:
    """Write an adapter of the model's first query projection."""
    width = json.loads((scene.model / "config.json").read_text())["hidden_size"]
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    matrix = np.full((4, width), value, dtype=np.float32)
    tensors = {f"{module}.lora_A.weight": matrix, f"{module}.lora_B.weight": np.ascontiguousarray(matrix.T)}
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    return write_adapter(scene.folder / name, tensors, **settings)


def load(scene: Scene, name: str, folder: Path) -> int:
    """Load an adapter as an operator; returns the status."""
    return scene.post({"lora_name": name, "lora_path": str(folder)}, "/load_lora_adapter", scene.operator)


def adapter_that_overflows(scene: Scene, **settings: Any) -> None:
    """Load an adapter whose products are not finite, if that is possible, and use it."""
    name = f"overflow-{time.time_ns()}"
    if load(scene, name, adapter(scene, name, **settings)) == 200:
        at_once([partial(scene.post, {"model": name, "prompt": [5, 6, 7, 8], "max_tokens": 16})] * CALLS)
        scene.post({"lora_name": name}, "/unload_lora_adapter", scene.operator)


def adapter_with_a_slow_pattern(scene: Scene) -> None:
    """Load an adapter whose `rank_pattern` backtracks for ever."""
    load(scene, "slow", adapter(scene, "slow", rank_pattern={"(([a-z.0-9_]+)+)+!": 4}))


def adapter_with_a_large_header(scene: Scene) -> None:
    """Load an adapter whose safetensors header has 70 MB."""
    folder = adapter(scene, "header")
    file = folder / "adapter_model.safetensors"
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"tensor.{number}": entry for number in range(900_000)}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    load(scene, "header", folder)


def truncated_prompts(scene: Scene) -> None:
    """Send prompts of nearly 4 MiB of which only the last tokens count."""
    body = {"prompt": "word " * 800_000, "truncate_prompt_tokens": 16, "max_tokens": 1}
    at_once([partial(scene.post, body)] * CALLS)


def unread_streams(scene: Scene) -> None:
    """Open streams of 16 long answers each, more than the decode workers have slots, and read nothing of them."""
    body = {"prompt": [5, 6, 7, 8], "n": 16, "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 1}
    headers = {"Authorization": f"Bearer {scene.hostile}"}
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=TIMEOUT_S))
        for _ in range(10):
            stack.enter_context(
                client.stream("POST", f"http://{scene.http}/v1/completions", json=body, headers=headers)
            )
        time.sleep(20.0)


def abandoned_scores(scene: Scene) -> None:
    """Leave calls that score long prompts as soon as they are sent."""
    body = {"prompt": list(range(3, 6000)), "echo": True, "prompt_logprobs": 1, "max_tokens": 1}
    headers = {"Authorization": f"Bearer {scene.hostile}"}
    for _ in range(8):
        with suppress(httpx.TimeoutException):
            httpx.post(f"http://{scene.http}/v1/completions", json=body, headers=headers, timeout=0.3)


def large_bodies(scene: Scene) -> None:
    """Post bodies that are refused for their size, their number of items, or their depth."""
    size = 4_000_000
    bodies: list[dict[str, Any]] = [
        {"prompt": [1] * (size // 3)},
        {"messages": [{}] * (size // 4)},
        {"prompt": "x", "stop": [""] * (size // 4)},
        {"prompt": "x", "logit_bias": {str(number): 1 for number in range(300_000)}},
        {"prompt": "x" * (20 << 20)},
    ]
    at_once(
        [partial(scene.post, body, "/chat/completions" if "messages" in body else "/completions") for body in bodies]
    )


def flood(scene: Scene, frames: Callable[[str], Iterator[bytes]]) -> None:
    """Send HTTP/2 frames over several connections for a while, and connect again whenever one is closed."""
    host, port = scene.grpc.split(":")
    end = time.monotonic() + FLOOD_S

    def send() -> None:
        while time.monotonic() < end:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as connection:
                for part in frames(scene.hostile):
                    connection.sendall(part)
                    if time.monotonic() > end:
                        return

    at_once([send] * CALLS)


def stopped(scene: Scene, name: str) -> None:
    """Suspend a process until it counts as hung and its replacement serves."""
    before = scene.pids()[name]
    scene.signal(name, signal.SIGSTOP)
    until(lambda: restarted(scene, name, before), STOPPED_S + RESTART_WITHIN_S)


def killed(scene: Scene, name: str) -> None:
    """Kill a process, and wait until its replacement serves."""
    before = scene.pids()[name]
    scene.signal(name, signal.SIGKILL)
    until(lambda: restarted(scene, name, before), RESTART_WITHIN_S)


def restarted(scene: Scene, name: str, before: int) -> bool:
    """Return True once another process has the name and serves."""
    with suppress(Exception):
        return scene.pids()[name] != before and scene.serves(name)
    return False


ATTACKS = (
    Attack("none", lambda _: time.sleep(FLOOD_S)),
    Attack("regex-240k", partial(answers_in_a_format, guided_regex="a?" * 120_000)),
    Attack("regex-12k", partial(answers_in_a_format, guided_regex="a?" * 6_000)),
    Attack("regex-abandoned", abandoned_regex),
    Attack(
        "choices-250k", partial(answers_in_a_format, guided_choice=[f"{n:05d} a choice of text" for n in range(10_000)])
    ),
    Attack(
        "ambiguous-ebnf", partial(answers_in_a_format, guided_grammar='root ::= x\nx ::= x x | "a" x "b" | [a-z ] | ""')
    ),
    Attack("adapter-scale", partial(adapter_that_overflows, lora_alpha=1e308)),
    Attack("adapter-values", partial(adapter_that_overflows, value=1e18)),
    Attack("adapter-pattern", adapter_with_a_slow_pattern),
    Attack("adapter-header", adapter_with_a_large_header),
    Attack("truncated-prompts", truncated_prompts),
    Attack("unread-streams", unread_streams),
    Attack("abandoned-scores", abandoned_scores),
    Attack("large-bodies", large_bodies),
    *(Attack(f"http2-{name}", partial(flood, frames=frames)) for name, frames in FLOODS.items()),
    Attack("controller-stopped", partial(stopped, name="controller"), kills=True),
    Attack("prefill-killed", partial(killed, name="prefill-0"), kills=True),
    Attack("decode-stopped", partial(stopped, name="decode-0"), kills=True),
    Attack("router-killed", partial(killed, name="router"), kills=True, disconnects=True),
)
