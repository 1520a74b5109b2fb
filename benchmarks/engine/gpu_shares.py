"""Measures the engine's steps as shares of the ceilings of one GPU.

Weights are random, shapes are real. Copy bandwidth and matrix rate are measured in the same run, and results are ratios
to them. `--quantization` and `--kv-cache-dtype` quantize weights and KV, whose bytes count as stored. With `--before`
the same steps are first measured in 16 bits.
"""

import argparse
import gc
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.command_line import Measured
from benchmarks.engine.device_spans import idle_share, idle_share_next_to_copies
from benchmarks.engine.gpu_engine import DECODE_STEPS, GpuEngine
from benchmarks.engine.profile import profile
from benchmarks.gpu_timing import copy_bandwidth, matrix_rate, measure_ceilings
from benchmarks.kernels import latent
from benchmarks.kernels.attention import Size, call_seconds, make_inputs, uneven
from benchmarks.results import run_facts, scheme_suffix
from tandem.engine.config import EngineConfig
from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.attention.triton_attention_plan import Plan, make_plan
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.shapes import write_shape
from tandem.engine.weights.gguf import default_cache

BATCHES = (1, 8, 32, 128, 256)
CONTEXT = 1024
LONG_DECODE = (128, 4096)
"""Number of rows, and context of each, of a decode step that spends most of its time on reading KV."""
PREFILLS = ((1, 512), (1, 2048), (1, 8192), (8, 2048))
ATTENTIONS = ((64, 2048), (128, 4096), (1, 32768))
UNEVEN = ((12, 2048), (48, 2048))
"""Pairs of a number of rows and their mean length in tokens; lengths vary like those of conversations."""
_STEP_TOKENS = 16384

Figures = dict[str, object]


def measure(arguments: argparse.Namespace, device: str) -> Measured:
    """Measure the steps, or write a trace of them with `--profile`."""
    config = EngineConfig.of(
        write_shape(arguments.shape, default_cache() / f"shape-{arguments.shape}"),
        device=device,
        dtype="bfloat16",
        random_weights=True,
        max_step_tokens=_STEP_TOKENS,
        max_batch_requests=max(BATCHES),
        memory_fraction=0.85,
        quantization=arguments.quantization,
        kv_cache_dtype=arguments.kv_cache_dtype,
    )
    scheme = scheme_suffix(arguments.quantization, arguments.kv_cache_dtype)
    began, before = psutil.Process().create_time(), Figures()
    if arguments.before:
        before, began = _in_16_bits(config), time.time()
    engine = GpuEngine(ModelRunner.load(config, _print_progress))
    engine.prefill_seconds(1, 16, rounds=1)
    started = time.time() - began
    cache = engine.runner.cache
    result: Figures = {"start_seconds": round(started, 2), "kv_tokens": cache.kv_pages.tokens_in(cache.pages)}
    print(f"start to first token {started:.1f} s", flush=True)
    if arguments.profile:
        result |= profile(engine, measure_ceilings(), arguments.profile)
    else:
        # Each ceiling is measured right before the steps that it limits, because matrix products heat the chip.
        copy = copy_bandwidth()
        print(f"copy {copy / 1e9:.0f} GB/s", flush=True)
        result |= {"copy_gb_per_s": round(copy / 1e9, 1)} | _decode(engine, copy)
        result |= _prefill(engine)
        if arguments.long_prompt:
            result |= _long_prompt(engine, arguments.long_prompt)
        spec, kv_dtype = engine.shape, cache.storage.dtype
        del engine, cache
        _free()
        shapes = sorted(spec.attention_shapes, key=lambda shape: shape.window is not None)
        for dtype in dict.fromkeys((torch.bfloat16, kv_dtype)):
            result |= _attention(shapes[0], dtype, copy) if shapes else _latents(spec, copy)
        if arguments.eager:
            result |= _without_graphs(config, result)
    result |= before | _over_before(before, result)
    result |= {"shape": arguments.shape + scheme, "dtype": "bfloat16", **run_facts(device)}
    return f"{'profile' if arguments.profile else 'engine'}-{arguments.shape}{scheme}", result


def _in_16_bits(config: EngineConfig) -> Figures:
    """Measure the steps without quantization: the figures of `_decode` and `_prefill`, with the prefix `before_`."""
    print("before: without quantization", flush=True)
    engine = GpuEngine(ModelRunner.load(replace(config, quantization=None, kv_cache_dtype="auto")))
    figures = _decode(engine, copy_bandwidth()) | _prefill(engine)
    del engine
    _free()
    print("now", flush=True)
    return {f"before_{name}": figure for name, figure in figures.items()}


def _over_before(before: Figures, now: Figures) -> Figures:
    """Return the speedup of each decode step and prefill over 16 bits."""
    figures: Figures = {}
    for name, earlier in before.items():
        same = name.removeprefix("before_")
        kind, _, size = same.partition("_ms_")
        if size and isinstance(earlier, float) and isinstance(later := now.get(same), float):
            figures[f"{kind}_over_before_{size}"] = round(earlier / later, 3)
    return figures


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _decode(engine: GpuEngine, copy: float) -> Figures:
    """Measure decode steps: bandwidth as a share of the copy bandwidth, step times, and the idle share.

    The idle share is given for all gaps between kernels, and for the gaps between consecutive steps alone.
    """
    figures: Figures = {}
    batches = _held(engine)
    for batch in batches:
        seconds = engine.decode_seconds(batch, CONTEXT)
        share = engine.decode_bytes([CONTEXT] * batch) / seconds / copy
        device = engine.graph_seconds([CONTEXT] * batch)
        spans = engine.decode_spans(batch, CONTEXT)
        idle = idle_share(spans)
        figures |= {
            f"decode_bw_ratio_b{batch}": round(share, 4),
            f"decode_ms_b{batch}": round(seconds * 1e3, 4),
            f"decode_device_ms_b{batch}": round(device * 1e3, 4),
            f"decode_idle_share_b{batch}": round(idle, 4),
            f"decode_idle_between_steps_share_b{batch}": round(idle_share_next_to_copies(spans), 4),
        }
        print(
            f"decode b{batch:<4} {seconds * 1e3:8.3f} ms  {share:6.1%} of copy, device {device * 1e3:.3f} ms,"
            f" idle {idle:.2%}",
            flush=True,
        )
    figures |= _long_decode(engine, copy)
    for batch in sorted({32, 256}.intersection(batches)):
        sampled = engine.decode_seconds(batch, CONTEXT, sampled=True)
        figures[f"decode_sampled_ms_b{batch}"] = round(sampled * 1e3, 4)
    for batch in sorted({32, 128, 256}.intersection(batches)):
        figures |= _uneven_decode(engine, batch, copy)
    return figures


def _long_decode(engine: GpuEngine, copy: float) -> Figures:
    """Measure decode steps of `LONG_DECODE` if the KV cache can hold them."""
    rows, context = LONG_DECODE
    if not engine.holds(rows, context + DECODE_STEPS // 2):
        print(f"decode b{rows:<4} left out: the KV cache holds fewer rows of {context} tokens", flush=True)
        return {}
    seconds = engine.decode_seconds(rows, context)
    share = engine.decode_bytes([context] * rows) / seconds / copy
    print(f"decode b{rows:<4} {seconds * 1e3:8.3f} ms  {share:6.1%} of copy: contexts of {context} tokens", flush=True)
    return {
        f"decode_bw_ratio_{rows}x{context}": round(share, 4),
        f"decode_ms_{rows}x{context}": round(seconds * 1e3, 4),
    }


def _uneven_decode(engine: GpuEngine, batch: int, copy: float) -> Figures:
    """Measure the device time of a step whose rows have uneven lengths."""
    longest = engine.runner.facts.max_context - 1
    contexts = [min(length, longest) for length in uneven(batch, CONTEXT)]
    seconds = engine.graph_seconds(contexts)
    share = engine.decode_bytes(contexts) / seconds / copy
    print(
        f"decode b{batch:<4} {seconds * 1e3:8.3f} ms  {share:6.1%} of copy: the device alone, uneven rows", flush=True
    )
    return {
        f"decode_uneven_device_ms_b{batch}": round(seconds * 1e3, 4),
        f"decode_uneven_bw_ratio_b{batch}": round(share, 4),
    }


def _held(engine: GpuEngine) -> list[int]:
    """Return those `BATCHES` that the KV cache can hold, and print the others."""
    held = [batch for batch in BATCHES if engine.holds(batch, CONTEXT + DECODE_STEPS // 2)]
    for batch in BATCHES:
        if batch not in held:
            print(f"decode b{batch:<4} left out: the KV cache holds fewer rows of {CONTEXT} tokens", flush=True)
    return held


def _prefill(engine: GpuEngine) -> Figures:
    """Measure prefill in one step, host included: FLOPS as a share of the matrix rate.

    The matrix rate is measured before and after each size: the chip is at its power limit, and the rate falls by 3 % as
    it heats up.
    """
    figures: Figures = {}
    rates = [matrix_rate()]
    for rows, tokens in PREFILLS:
        seconds = engine.prefill_seconds(rows, tokens)
        rates.append(matrix_rate())
        matrix = sum(rates[-2:]) / 2
        share = engine.prefill_flops(rows, tokens) / seconds / matrix
        figures |= {
            f"prefill_flops_ratio_{rows}x{tokens}": round(share, 4),
            f"prefill_ms_{rows}x{tokens}": round(seconds * 1e3, 3),
            f"matrix_tflops_beside_{rows}x{tokens}": round(matrix / 1e12, 1),
        }
        print(
            f"prefill {rows}x{tokens:<6} {seconds * 1e3:8.2f} ms  {share:6.1%} of the matrix rate around it,"
            f" {matrix / 1e12:.0f} TFLOP/s",
            flush=True,
        )
    return {"matrix_tflops": round(sum(rates) / len(rates) / 1e12, 1)} | figures


def _long_prompt(engine: GpuEngine, tokens: int) -> Figures:
    """Measure one prompt in steps of the default size, as on a worker without other requests."""
    runner, chunk = engine.runner, EngineConfig.of(Path()).max_step_tokens
    tokens = min(tokens, runner.facts.max_context, runner.cache.kv_pages.tokens_in(runner.cache.pages))
    seconds = engine.chunked_seconds(tokens, chunk)
    share = engine.prefill_flops(1, tokens) / seconds / matrix_rate()
    print(f"prompt of {tokens} tokens in chunks {seconds:8.2f} s  {share:6.1%} of the matrix rate", flush=True)
    return {
        "long_prompt_tokens": tokens,
        "long_prompt_seconds": round(seconds, 3),
        "long_prompt_flops_ratio": round(share, 4),
    }


def _attention(shape: AttentionShape, kv_dtype: torch.dtype, copy: float) -> Figures:
    """Measure decode attention of one layer as KV bytes per second, ignoring the model's sliding window.

    Launches alternate between layers, so that their KV exceeds the caches. Over 8-bit KV the names of figures end with
    its dtype.
    """
    figures: Figures = {}
    name = str(kv_dtype).removeprefix("torch.")
    suffix = "" if kv_dtype == torch.bfloat16 else f"_{name}"
    for rows, tokens in ATTENTIONS:
        size = Size(f"{rows}x{tokens}{suffix}", (tokens,) * rows, shape, kv_dtype)
        seconds = call_seconds(size, make_inputs(size))
        share = size.bytes / seconds / copy
        figures |= {
            f"attention_bw_ratio_{size.name}": round(share, 4),
            f"attention_us_{size.name}": round(seconds * 1e6, 3),
        }
        print(f"attention {name} {rows}x{tokens:<6} {seconds * 1e6:8.1f} us  {share:6.1%} of copy", flush=True)
    for rows, mean in UNEVEN:
        size = Size(f"{rows}_uneven{suffix}", uneven(rows, mean), shape, kv_dtype)
        inputs = make_inputs(size)
        walking, split = (call_seconds(size, inputs, choose) for choose in (make_plan, _split_alike))
        share = size.bytes / walking / copy
        figures |= {
            f"attention_bw_ratio_{size.name}": round(share, 4),
            f"attention_split_over_walking_{size.name}": round(split / walking, 3),
        }
        print(
            f"attention {name} {rows} uneven {walking * 1e6:8.1f} us  {share:6.1%} of copy,"
            f" {split / walking:.2f} x as fast"
        )
    return figures


def _latents(spec: ModelSpec, copy: float) -> Figures:
    """Measure the decode attention of a model with latent attention, with and without the products around it."""
    figures: Figures = {}
    for rows, tokens in ATTENTIONS:
        size = latent.Size(rows, tokens, spec.latent_shapes[0])
        seconds, _ = latent.call_seconds(size, latent.make_inputs(size))
        share = size.bytes / seconds / copy
        figures |= {
            f"attention_bw_ratio_{rows}x{tokens}": round(share, 4),
            f"attention_us_{rows}x{tokens}": round(seconds * 1e6, 3),
        }
        print(f"latent attention {rows}x{tokens:<6} {seconds * 1e6:8.1f} us  {share:6.1%} of copy", flush=True)
    return figures


def _split_alike(rows: int, *others: Any) -> Plan:
    """Return a plan that cuts every row into the same number of splits."""
    plan = make_plan(rows, *others)
    return replace(plan, units=0, splits=max(1, plan.units // rows))


def _without_graphs(config: EngineConfig, with_graphs: Figures) -> Figures:
    """Measure the decode steps without CUDA graphs, with every kernel launched by the host."""
    engine = GpuEngine(ModelRunner.load(replace(config, cuda_graphs=False)))
    figures: Figures = {}
    for batch in (held_batch for held_batch in _held(engine) if f"decode_ms_b{held_batch}" in with_graphs):
        seconds = engine.decode_seconds(batch, CONTEXT, steps=24)
        figures[f"decode_eager_ms_b{batch}"] = round(seconds * 1e3, 4)
        print(
            f"decode b{batch:<4} without graphs {seconds * 1e3:8.3f} ms, with {with_graphs[f'decode_ms_b{batch}']} ms"
        )
    return figures


def _print_progress(what: str, done: float) -> None:
    if done in {0.0, 1.0}:
        print(f"[{time.time() - psutil.Process().create_time():.1f} s] {what} {done:.0%}", flush=True)
