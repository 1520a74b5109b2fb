"""Measures latent attention on this GPU: `python -m benchmarks.latent_attention --device cuda [--plans] [--save]`.

Decode attention over DeepSeek's latents, beside a copy on the device in the same run: the bytes of the latents over the
time, as a share of the copy's bandwidth. `attention` is flash-decoding with its merge alone; `whole` includes the
products before and after it, as a layer computes them. Then prompts of the expanded form, as a share of the matrix rate
by the operations of causal attention and of computing keys and values. Activations are random bfloat16. `--plans` ranks
other tiles of decode attention, too. The last line is one JSON object.
"""

import argparse
import json
import time
from concurrent.futures import Future

import torch

from benchmarks.command_line import need_gpu
from benchmarks.gpu.ceilings import copy_bandwidth, matrix_rate, median_seconds
from benchmarks.results import run_facts, save_result
from tandem.engine.config import GPU_PAGE_TOKENS
from tandem.engine.config.attention import LatentShape

LITE = LatentShape(heads=16, latent=512, rope=64, nope=128, v_dim=128, scale=192**-0.5)
"""DeepSeek-V2-Lite."""
LARGE = LatentShape(heads=128, latent=512, rope=64, nope=128, v_dim=128, scale=192**-0.5)
"""DeepSeek-V3."""
DECODE = ((LITE, 64, 4096), (LITE, 1, 32768), (LITE, 128, 4096), (LARGE, 64, 4096))
"""Shape, rows and context."""
PROMPTS = ((0, 2048), (0, 8192), (8192, 2048), (8192, 128))
"""Tokens in the cache before, and tokens of the prompt's chunk."""

Figures = dict[str, object]


def main() -> None:
    """Measures all sizes, and prints JSON last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda"])
    parser.add_argument("--plans", action="store_true", help="rank other tiles of decode attention")
    parser.add_argument("--save", action="store_true", help="keep the result in benchmarks/results")
    arguments = parser.parse_args()
    need_gpu()
    started = time.monotonic()
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e9:.0f} GB/s", flush=True)
    result: Figures = {"copy_gb_per_s": round(copy / 1e9, 1)} | _decode(copy, rank_plans=arguments.plans) | _prompts()
    result |= {"seconds": round(time.monotonic() - started, 1), "dtype": "bfloat16", **run_facts("cuda")}
    if arguments.save:
        print("saved", save_result("latent-attention", result))
    print(json.dumps(result))


def _decode(copy: float, *, rank_plans: bool) -> Figures:
    # Triton is not installed where there is no GPU.
    from benchmarks.gpu.latent_timing import Size, candidates, make_inputs, measure, rank

    found: Figures = {}
    for shape, rows, context in DECODE:
        size = Size(rows, context, shape)
        inputs = make_inputs(size)
        whole, alone = measure(size, inputs)
        name = f"{rows}x{context}_h{shape.heads}"
        found |= {
            f"latent_bw_ratio_{name}": round(size.bytes / alone / copy, 4),
            f"latent_whole_bw_ratio_{name}": round(size.bytes / whole / copy, 4),
            f"latent_us_{name}": round(alone * 1e6, 2),
            f"latent_whole_us_{name}": round(whole * 1e6, 2),
        }
        print(
            f"decode {name:16} attention {alone * 1e6:8.1f} us {size.bytes / alone / copy:6.1%} of copy,"
            f" whole {whole * 1e6:8.1f} us {size.bytes / whole / copy:6.1%}",
            flush=True,
        )
        for seconds, plan in rank(size, inputs, candidates(16 if shape is LITE else 64)) if rank_plans else []:
            print(f"  {seconds * 1e6:8.1f} us {size.bytes / seconds / copy:6.1%} {plan}", flush=True)
    return found


def _prompts() -> Figures:
    """Measures one chunk of a layer, the launches of the host included where they take longer than the device."""
    matrix = matrix_rate()
    found: Figures = {"matrix_tflops": round(matrix / 1e12, 1)}
    for cached, tokens in PROMPTS:
        seconds, implementation = _prompt_seconds(LITE, cached, tokens)
        pairs = tokens * cached + tokens * (tokens + 1) / 2
        expanded = (cached + tokens) * LITE.latent * (LITE.nope + LITE.v_dim)
        flop = 2 * LITE.heads * (pairs * (LITE.query + LITE.v_dim) + expanded)
        name = f"{tokens}_behind_{cached}"
        found |= {
            f"latent_prefill_us_{name}": round(seconds * 1e6, 1),
            f"latent_prefill_flops_ratio_{name}": round(flop / seconds / matrix, 4),
            "latent_prefill": implementation,
        }
        print(f"prompt {name:18} {seconds * 1e6:8.1f} us {flop / seconds / matrix:6.1%} of the matrix rate", flush=True)
    print(f"prompts by {found['latent_prefill']}")
    return found


def _prompt_seconds(shape: LatentShape, cached: int, tokens: int) -> tuple[float, str]:
    """Returns seconds of a layer's attention of one chunk, and the name of the implementation for long ones."""
    from tandem.engine.kernels.base import StepLayout
    from tandem.engine.kernels.latent.block_attention import BlockAttention, choose_block_attention, compiled
    from tandem.engine.kernels.latent.latent_kernels import LatentKernels
    from tandem.engine.kernels.layers import LatentLayer, Norm
    from tandem.engine.kernels.triton_launch import overlaps_launches

    device, dtype = torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    blocks: Future[BlockAttention] = Future()
    blocks.set_result(compiled(choose_block_attention(device, dtype, [shape]), [shape], dtype, device))
    kernels = LatentKernels([shape], device, dtype, overlaps_launches(), blocks)
    context = cached + tokens
    pages = -(-context // GPU_PAGE_TOKENS)
    position = torch.arange(context, device=device)
    layout = StepLayout(
        positions=position[cached:].int(),
        slots=position[cached:],
        row_starts=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([context], dtype=torch.int32, device=device),
        page_table=torch.arange(pages, dtype=torch.int32, device=device).view(1, pages),
        max_row_tokens=tokens,
        max_context=context,
        max_cached=cached,
    )
    cache = torch.randn(pages, 1, 1, 1, GPU_PAGE_TOKENS, shape.cached, dtype=dtype, device=device)
    q = torch.randn(tokens, shape.heads, shape.query, dtype=dtype, device=device)
    kv_up = torch.randn(shape.heads, shape.nope + shape.v_dim, shape.latent, dtype=dtype, device=device)
    kv_up /= shape.latent**0.5
    norm = Norm(torch.ones(shape.latent, dtype=dtype, device=device), 1e-6)
    layer = LatentLayer(0, shape, torch.zeros(context, shape.rope, device=device), norm, kv_up)
    kernels.begin_step(cache, layout, 0)
    seconds = median_seconds(lambda: kernels.attention(q, layer, cache, layout, 0))
    return seconds, type(blocks.result()).__name__


if __name__ == "__main__":
    main()
