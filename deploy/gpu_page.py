"""Writes docs/guides/which_model.md, which models fit which GPUs, with the code of `tandem plan`.

Run it by `python -m deploy.gpu_page`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from tandem.capacity.plan.memory import Memory
from tandem.capacity.plan.worker_kind import GROUP_SIZES, SETTINGS, WorkerKind, usable_bytes
from tandem.capacity.planner.demand import Demand
from tandem.cli.planning.plan_options import DemandOptions
from tandem.cost_model.devices import DEVICES
from tandem.engine.memory import GIB
from tandem.engine.model_sizes import total_weights
from tandem.engine.models.shapes import shape_config, shape_names

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "which_model.md"
_NONE = "–"
_CUT = "-layers"
"""A part of the names of shapes that are models cut to a few layers, for measurements; the page leaves them out."""
_HEAD = """# Which model fits my GPU

A cell says how many tokens of KV cache fit beside the weights, for all requests of a worker together; a request of \
{prompt:,.0f} prompt tokens and {answer:,.0f} answer tokens holds {kv:,.0f} of them at its longest. "2 × 150 k": the \
model is divided among 2 GPUs of a host (`--tensor-parallel-size 2`), the fewest with which such a request fits, and \
the cell is for all of them together. "–": it does not fit on 8. The figures are those of `tandem plan`, which also \
says how many GPUs a load needs; any other model in Hugging Face layout is planned with `--model`:

```
tandem plan --shape qwen3-8b --gpu L4 --quantization int8 --rate 2
tandem plan --model /models/Qwen3-8B --gpu L4 --rate 2
```

`--quantization` rounds 16-bit weights while they are loaded ([Quantization](../quantization.md)); `--kv-cache-dtype \
int8` nearly doubles the tokens of most models. A worker uses {share:.0%} of a GPU's memory (`--memory-fraction`), and \
2 GiB of it for other things than weights and KV. [Models](../models.md) lists the families that are served. This page \
is made by `python -m deploy.gpu_page`.
"""


def page() -> str:
    """Return the page as Markdown."""
    demand = DemandOptions().demand()
    share = SETTINGS.gpu_memory_fraction
    head = _HEAD.format(prompt=demand.prompt_tokens, answer=demand.answer_tokens, kv=demand.kv_tokens, share=share)
    gpus = (f"{', '.join(names)}, {gib:g} GiB" for gib, names in same_memory().items())
    columns = ("model", "parameters", "weights", "GiB", *gpus)
    table = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    table += (f"| {' | '.join(row)} |" for row in rows(demand))
    return "\n".join((head, *table, ""))


def same_memory() -> dict[float, list[str]]:
    """Return the names of GPUs by their memory in GiB; GPUs with the same memory share a column."""
    names: dict[float, list[str]] = {}
    for name, device in DEVICES.items():
        names.setdefault(device.memory_gib, []).append(name)
    return names


def rows(demand: Demand) -> Iterator[tuple[str, ...]]:
    """Yield the cells of one row for each model and each form of its weights."""
    names = [name for name in shape_names() if _CUT not in name]
    for name in sorted(names, key=lambda name: total_weights(shape_config(name))):
        model = shape_config(name)
        stored = "16 bits" if model.quantization is None else model.quantization.method
        base = WorkerKind(name, model, next(iter(DEVICES.values())))
        for form, spec in base.weight_forms():
            groups = replace(base, model=spec, group_sizes=GROUP_SIZES).groups()
            memories = list(_until_it_fits(groups, demand))
            gib, billions = memories[0][1].weight_bytes / GIB, total_weights(model) / 1e9
            cells = (cell(memories, usable_bytes(DEVICES[names[0]]), demand) for names in same_memory().values())
            yield name, f"{billions:.3g} B", f"`{form}`" if form else stored, f"{gib:,.1f}", *cells


def _until_it_fits(groups: Iterable[WorkerKind], demand: Demand) -> Iterator[tuple[int, Memory]]:
    """Yield the number of GPUs of each group and the memory of each GPU, until a request fits on the smallest GPU."""
    smallest = min(map(usable_bytes, DEVICES.values()))
    for group in groups:
        memory = group.memory(demand)
        yield group.gpus, memory
        if replace(memory, device_bytes=smallest).fits(demand):
            return


def cell(memories: Iterable[tuple[int, Memory]], device_bytes: float, demand: Demand) -> str:
    """Return the number of KV tokens of a worker with the fewest GPUs with which a mean request fits.

    `memories` has the memory of each GPU by the number of GPUs, ascending, and `device_bytes` replaces that of the GPU.
    """
    for gpus, memory in memories:
        on_device = replace(memory, device_bytes=device_bytes)
        if on_device.fits(demand):
            tokens = _tokens(on_device.kv_tokens)
            return tokens if gpus == 1 else f"{gpus} × {tokens}"
    return _NONE


def _tokens(count: float) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
