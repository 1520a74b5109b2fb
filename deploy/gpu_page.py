"""Writes docs/guides/which_model.md, which models fit which GPUs, with the code of `tandem plan`.

Run it by `python -m deploy.gpu_page`.
"""

from collections.abc import Iterator
from pathlib import Path

from tandem.capacity.plan.what_fits import Fit, what_fits
from tandem.capacity.plan.worker_kind import SETTINGS
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
says how many GPUs a load needs; `tandem models show` has the same table of any other model:

```
tandem models show Qwen/Qwen3-8B
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
        billions = total_weights(model) / 1e9
        for width in what_fits(name, model, demand):
            form = f"`{width.quantization}`" if width.quantization else stored
            cells = (cell(width.fits[names[0]]) for names in same_memory().values())
            yield name, f"{billions:.3g} B", form, f"{width.weight_bytes / GIB:,.1f}", *cells


def cell(fit: Fit | None) -> str:
    """Return the number of KV tokens of a worker, after its number of GPUs if it has several."""
    if fit is None:
        return _NONE
    tokens = _tokens(fit.kv_tokens)
    return tokens if fit.gpus == 1 else f"{fit.gpus} × {tokens}"


def _tokens(count: float) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count / 1e3:.0f} k"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
