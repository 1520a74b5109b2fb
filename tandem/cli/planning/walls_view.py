"""The tables of `tandem plan --roofline` and `--kv-table`, and the line about KV transfers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from tandem.capacity.plan.worker_kind import WorkerKind
    from tandem.capacity.planner.demand import Demand


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def roofline_table(kind: WorkerKind, demand: Demand) -> Iterator[str | Table]:
    """Yield a title, and a table with the ridge of each known GPU and the wall of each phase on it."""
    from tandem.capacity.plan.walls import phases, ridge
    from tandem.cost_model.devices import DEVICES, NOT_SERVED

    works = list(phases(kind, demand))
    yield (
        f"{kind.name}, prompts of {demand.computed_tokens:.0f} computed tokens, decode steps of 1 to 256 requests with"
        f" a context of {demand.context_tokens:.0f}; operations per byte, and what limits; * = no worker runs on it"
    )
    table = _table("GPU", "ridge", *(work.name for work in works))
    table.add_row("operations per byte", "", *(f"{work.intensity:.3g}" for work in works))
    for name, device in (DEVICES | NOT_SERVED).items():
        shown = f"{name}*" if name in NOT_SERVED else name
        table.add_row(shown, f"{ridge(device):.0f}", *(work.wall(device) for work in works))
    yield table


def kv_table(kind: WorkerKind, demand: Demand) -> Iterator[str | Table]:
    """Yield a title, and a table with the GiB of KV of each batch size and context; a mark where it does not fit."""
    from tandem.capacity.plan.walls import BATCHES, CONTEXTS, kv_gib

    free = kind.memory(demand).kv_bytes * kind.gpus / 2**30
    yield f"GiB of KV by requests and tokens of each; * = more than the {free:.0f} GiB that a worker has for KV"
    contexts = [tokens for tokens in CONTEXTS if tokens <= kind.model.max_context] or [kind.model.max_context]
    table = _table("requests", *(f"{tokens:,}" for tokens in contexts))
    for batch in BATCHES:
        sizes = [kv_gib(kind, batch, tokens) for tokens in contexts]
        table.add_row(str(batch), *(f"{gib:.3g}{'*' if gib > free else ''}" for gib in sizes))
    yield table


def transfer_line(kind: WorkerKind, demand: Demand, network_gbps: float) -> str:
    """Return the line about the hand-over of a prompt's KV between the GPUs of a host, and over the network."""
    from tandem.capacity.plan.walls import transfer_seconds

    tokens, rates = demand.prompt_tokens, (kind.device.link_bytes_per_s, network_gbps * 1e9 / 8)
    link_s, network_s = (transfer_seconds(kind, tokens, rate) for rate in rates)
    gib = transfer_seconds(kind, tokens, 2**30)
    busy = demand.per_s * network_s
    return (
        f"transfer  {gib:.2f} GiB of KV a prompt, {link_s * 1e3:.1f} ms within a host, {network_s * 1e3:.1f} ms over"
        f" {network_gbps:g} Gb/s between hosts, which {demand.per_s:g} requests/s use {busy:.0%} of"
    )
