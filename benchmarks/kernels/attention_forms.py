"""Measures forms of attention: `python -m benchmarks.kernels forms [--save]`.

Prompts: the engine's kernel (flash-attn-4 on Hopper), PyTorch's SDPA, and plain products that store all scores, by
length, with the memory that each allocates; beside them the matrix products of the same layer, which attention
overtakes at some length. Decode steps: the same number of heads with as many, fewer and one KV head (MHA, GQA, MQA),
and DeepSeek's latent attention (MLA): bytes of KV a token, time of a step, and of a hand-over by the network's rate.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.command_line import Measured, above_0, at_least
from benchmarks.results import run_facts
from tandem.engine.config.attention import AttentionShape, LatentShape
from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, ModelSpec
from tandem.engine.kernels.attention.prefill_attention import (
    AttentionKind,
    choose_prefill_attention,
    compiled,
    one_prompt,
)
from tandem.engine.kernels.kv_cache import kv_view, layer_part, unquantized
from tandem.engine.kernels.layers import AttentionLayer
from tandem.engine.models.shapes import shape_config, shape_names
from tandem.protocol.ending import pages_for
from tandem.settings.engine import GPU_PAGE_TOKENS

LENGTHS = (512, 2048, 8192, 32768, 65536, 131072)
NAIVE_MOST = 8192
"""The longest prompt whose scores are stored: those of 32 heads take 8 GiB in float32."""
LATENT = LatentShape(heads=32, latent=512, rope=64, nope=128, v_dim=128, scale=192**-0.5)
"""DeepSeek's dimensions, with as many heads as the other forms have."""
_ROUNDS = 5
_ITEM_BYTES = 2
Seconds = Callable[[Callable[[], object]], float]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--shape", choices=shape_names(), default="llama-3-8b", help="of grouped-query attention")
    parser.add_argument("--lengths", type=at_least(1), nargs="+", default=list(LENGTHS), help="of prompts, ascending")
    parser.add_argument("--rows", type=at_least(1), default=64, help="requests of a decode step")
    parser.add_argument("--context", type=at_least(1), default=4096, help="tokens of each of them")
    parser.add_argument("--network-gbps", type=above_0, default=400.0, help="Gb/s of the network, for hand-overs")


def measure(options: argparse.Namespace) -> Measured:
    """Measure prompts and decode steps."""
    spec = shape_config(options.shape)
    prompts = [prompt_row(spec, tokens, torch.device("cuda")) for tokens in options.lengths]
    heads = head_rows(spec, options.rows, options.context, options.network_gbps, decode_seconds)
    overtakes = overtaking_length({row["tokens"]: (row["engine_ms"], row["products_ms"]) for row in prompts})
    facts = {"shape": options.shape, "rows": options.rows, "context": options.context}
    return f"attention-forms-{options.shape}", {
        **facts, "network_gbps": options.network_gbps, "prompts": prompts, "overtakes_products_at": overtakes,
        "heads": heads, "dtype": "bfloat16", **run_facts("cuda"),
    }  # fmt: skip


def prompt_row(spec: ModelSpec, tokens: int, device: torch.device) -> dict[str, float]:
    """Return and print the milliseconds of one layer for a prompt of `tokens` tokens, and GiB that each allocates."""
    attention, feed_forward = spec.layers[0].attention, spec.layers[0].feed_forward
    assert isinstance(attention, GroupedQueryAttention)
    assert isinstance(feed_forward, DenseFeedForward)
    shape = attention.shape
    pages = pages_for(tokens, GPU_PAGE_TOKENS)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.bfloat16, device=device)

    q = random(tokens, shape.heads, shape.head_dim)
    planes = random(pages, 1, shape.kv_heads, GPU_PAGE_TOKENS * 2 * shape.head_dim)
    cache = kv_view(planes, (shape.head_dim, shape.head_dim), GPU_PAGE_TOKENS)
    keys, values = (
        unquantized(layer_part(cache, 0, part)).transpose(0, 1).flatten(1, 2)[:, :tokens] for part in range(2)
    )
    engine = choose_prefill_attention(device, torch.bfloat16, [AttentionKind(shape)], GPU_PAGE_TOKENS, pdl=False)
    engine = compiled(engine, [AttentionKind(shape)], torch.bfloat16, device)
    layer, layout = AttentionLayer(0, shape, rope=q, sinks=None), one_prompt(tokens, pages, device)
    engine.begin_step(cache, layout, 0)
    forms: dict[str, Callable[[], Tensor]] = {
        "engine": lambda: engine(q, layer, cache, layout, 0),
        "sdpa": lambda: _sdpa(q, keys, values, shape),
        **({"naive": lambda: _naive(q, keys, values, shape)} if tokens <= NAIVE_MOST else {}),
    }
    expected = forms["sdpa"]().float()
    row: dict[str, float] = {"tokens": tokens}
    for name, run in forms.items():
        torch.testing.assert_close(run().float(), expected, atol=0.03, rtol=0.03, msg=f"{name} differs from SDPA")
        row[f"{name}_ms"], gib = _measured(run, device)
        row |= {} if gib is None else {f"{name}_gib": gib}
    inner = feed_forward.width
    sizes = (shape.qkv_size, spec.hidden_size), (spec.hidden_size, shape.output_size)
    weights = [random(n, k) for n, k in (*sizes, (2 * inner, spec.hidden_size), (spec.hidden_size, inner))]
    inputs = [random(tokens, weight.shape[1]) for weight in weights]
    row["products_ms"], _ = _measured(
        lambda: [x @ weight.t() for x, weight in zip(inputs, weights, strict=True)], device
    )
    print(row, flush=True)
    return row


def _sdpa(q: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> Tensor:
    mixed = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, scale=shape.scale, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def _naive(q: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape) -> Tensor:
    """Compute attention with all scores in memory."""
    group = shape.heads // shape.kv_heads
    keys, values = (part.repeat_interleave(group, dim=0) for part in (keys, values))
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2)).float() * shape.scale
    hidden = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1).to(q.dtype) @ values).transpose(0, 1)


def _measured(run: Callable[[], object], device: torch.device) -> tuple[float, float | None]:
    """Return the median milliseconds of a call, and the most GiB that it allocates; None on a CPU."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        from benchmarks.gpu_timing import median_seconds

        took_s = median_seconds(run, rounds=_ROUNDS, warm=2)
        return round(took_s * 1e3, 4), round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return round(median(times) * 1e3, 4), None


def overtaking_length(times: Mapping[float, tuple[float, float]]) -> int | None:
    """Return the prompt length from which attention takes longer than the products of its layer.

    `times` has both by length. Their ratio is interpolated between two lengths; None = attention is shorter at all.
    """
    before = (0.0, 0.0)
    for tokens in sorted(times):
        attention, products = times[tokens]
        ratio = attention / products
        if ratio >= 1:
            length, lower = before
            return round(length + (tokens - length) * (1 - lower) / (ratio - lower))
        before = tokens, ratio
    return None


def head_rows(
    spec: ModelSpec, rows: int, context: int, network_gbps: float, seconds: Callable[..., float]
) -> list[dict[str, object]]:
    """Return and print bytes a token, the time of a decode step's attention in all layers, and that of a hand-over.

    `seconds(shape, rows, context)` measures the attention of one layer.
    """
    attention = spec.layers[0].attention
    assert isinstance(attention, GroupedQueryAttention)
    shape, layers = attention.shape, len(spec.layers)
    forms: dict[str, AttentionShape | LatentShape] = {
        "MHA": replace(shape, kv_heads=shape.heads),
        "GQA": shape,
        "MQA": replace(shape, kv_heads=1),
        "MLA": replace(LATENT, heads=shape.heads),
    }
    made = []
    for name, form in forms.items():
        cached = form.cached if isinstance(form, LatentShape) else form.kv_heads * (form.head_dim + form.v_dim)
        token_bytes = cached * _ITEM_BYTES * layers
        made.append(
            {
                "form": name,
                "bytes_per_token": token_bytes,
                "step_ms": round(layers * seconds(form, rows, context) * 1e3, 3),
                "hand_over_ms": round(context * token_bytes / (network_gbps / 8 * 1e9) * 1e3, 2),
            }
        )
        print(made[-1], flush=True)
    return made


def decode_seconds(form: AttentionShape | LatentShape, rows: int, context: int) -> float:
    """Return the seconds of decode attention of one layer on this GPU, with the engine's kernels."""
    from benchmarks.kernels import attention, latent

    if isinstance(form, LatentShape):
        size = latent.Size(rows, context, form)
        return latent.call_seconds(size, latent.make_inputs(size))[0]
    workload = attention.Size("", (context,) * rows, form)
    return attention.call_seconds(workload, attention.make_inputs(workload))
