"""Sections of docs/performance.md about the engine and its kernels."""

import math
import re
from collections.abc import Iterable
from pathlib import Path

from benchmarks.results import Run, newest_result, read_results
from benchmarks.sections.markdown import listed, or_dash, section, table
from tandem.capacity.simulation.hardware import ITEM_BYTES
from tandem.cost_model.step_work import StepWork
from tandem.engine.model_sizes import model_sizes
from tandem.engine.models.shapes import shape_config

ENGINE_SHAPES = (
    "llama-3-8b",
    "llama-3.2-1b",
    "qwen3-0.6b",
    "gemma-3-12b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
    "gpt-oss-20b",
)

_BATCHES = (1, 32, 128)


def engine(folder: Path) -> str:
    """Return the section on decode steps and prefill of each model as shares of the ceilings."""
    runs = [newest_result(folder, f"engine-{shape}-", "prefill_flops_ratio_1x2048") for shape in ENGINE_SHAPES]
    return section(
        "Engine",
        "Decode steps with a context of about 1,024 tokens, prefill of one prompt, bfloat16.",
        table(
            (
                "model",
                "hardware",
                "decode share of bandwidth, batch 1, 32, 128",
                "decode step, ms",
                "prefill share of peak, 2,048 and 8,192 tokens",
                "start, s",
            ),
            (
                (
                    run["shape"],
                    run["hardware"]["name"],
                    _figures(run, "decode_bw_ratio_b", _BATCHES),
                    _figures(run, "decode_ms_b", _BATCHES),
                    listed((run[f"prefill_flops_ratio_1x{tokens}"] for tokens in (2048, 8192)), ".2f"),
                    f"{run['start_seconds']:.0f}",
                )
                for _, run in runs
            ),
        ),
        "python -m benchmarks.engine --device cuda --shape MODEL --save",
        runs,
    )


def by_batch(folder: Path) -> str:
    """Return the section on tokens/s by batch beside the limits of bandwidth and arithmetic."""
    name, run = newest_result(folder, "engine-llama-3-8b-", "decode_ms_b256")
    eager_name, eager = newest_result(folder, "engine-llama-3-8b-", "decode_eager_ms_b1")
    sizes = model_sizes(shape_config(run["shape"]), ITEM_BYTES)
    text = (
        "Tokens per second of decode steps with a context of 1,024 tokens, beside what memory bandwidth and arithmetic "
        "alone would allow: the bytes of a step over the rate of a device copy, and its operations over the rate of a "
        "large product, both measured in the same run. The last line is what CUDA graphs save of a step whose kernels "
        "the host would launch one by one."
    )

    def compute_s(batch: int) -> float:
        flops = sizes.step_flops(StepWork(decode_rows=batch, decode_context_tokens=1024 * batch))
        return flops / float(run["matrix_tflops"] * 1e12)

    batches = [int(key.removeprefix("decode_ms_b")) for key in run if re.fullmatch(r"decode_ms_b\d+", key)]
    seconds = {batch: run[f"decode_ms_b{batch}"] / 1e3 for batch in batches}
    saved = {
        batch: eager.get(f"decode_eager_ms_b{batch}", math.nan) - eager[f"decode_ms_b{batch}"] for batch in batches
    }
    lines = table(
        ("requests", *map(str, batches)),
        (
            ("measured, tokens/s", *(f"{batch / seconds[batch]:,.0f}" for batch in batches)),
            (
                "by bandwidth",
                *(f"{batch / (seconds[batch] * run[f'decode_bw_ratio_b{batch}']):,.0f}" for batch in batches),
            ),
            ("by arithmetic", *(f"{batch / compute_s(batch):,.0f}" for batch in batches)),
            ("saved by CUDA graphs, ms", *(or_dash(saved[batch], ".2f") for batch in batches)),
        ),
    )
    title = f"Decode by batch: {run['shape']}, {run['hardware']['name']}"
    runs = [(name, run), (eager_name, eager)]
    command = "python -m benchmarks.engine --device cuda --shape llama-3-8b --eager --save"
    return section(title, text, lines, command, runs)


def chunks(folder: Path) -> str:
    """Return the section on chunks beside answers; empty until a run is kept."""
    if not (runs := read_results(folder, "chunks-")):
        return ""
    name, run = runs[-1]
    text = (
        f"Steps of {run['decoding']} requests with contexts of {run['context']:,} tokens that also compute a chunk of "
        "a prompt. The time of the step is the ITL of all these requests."
    )
    lines = table(
        ("prompt tokens of a step", "ITL ms", "prompt tokens/s", "answer tokens/s"),
        (
            (
                f"{row['chunk']:,}",
                f"{row['itl_ms']:.1f}",
                f"{row['prompt_tokens_per_s']:,.0f}",
                f"{row['answer_tokens_per_s']:,.0f}",
            )
            for row in run["rows"]
        ),
    )
    title = f"Chunks beside answers: {run['shape']}, {run['hardware']['name']}"
    return section(title, text, lines, "python -m benchmarks.engine chunks --save", [(name, run)])


def quantized(folder: Path) -> str:
    """Return the section on quantized weights and KV."""
    newest = {run["shape"]: (name, run) for name, run in read_results(folder, "engine-llama-3-8b_")}
    runs = [newest[shape] for shape in sorted(newest) if "decode_over_before_b1" in newest[shape][1]]
    batches = (1, 32, 128, 256)
    return section(
        "Engine: quantized llama-3-8b",
        "Decode steps as above, and how many times as fast decode steps and prompts are as those in bfloat16, which the"
        " same run measures first. The share counts codes and scales as they are stored.",
        table(
            (
                "weights and KV",
                "hardware",
                "decode share of bandwidth, batch 1, 32, 128, 256",
                "decode step, ms",
                "times as fast",
                "prompts of 512, 2,048, 8,192 tokens, times as fast",
                "KV tokens",
            ),
            (
                (
                    run["shape"].removeprefix("llama-3-8b_").replace("_", ", ").replace("kv-", "KV "),
                    run["hardware"]["name"],
                    _figures(run, "decode_bw_ratio_b", batches),
                    _figures(run, "decode_ms_b", batches),
                    _figures(run, "decode_over_before_b", batches),
                    _figures(run, "prefill_over_before_1x", (512, 2048, 8192)),
                    f"{run['kv_tokens']:,}",
                )
                for _, run in runs
            ),
        ),
        "python -m benchmarks.engine --device cuda --shape llama-3-8b --quantization WEIGHTS --kv-cache-dtype KV"
        " --before --save",
        runs,
    )


def _figures(run: Run, name: str, sizes: Iterable[int]) -> str:
    """Return the figures `name` for some sizes, with a dash for each size that exceeds the GPU's memory."""
    return ", ".join(f"{run[key]:.2f}" if (key := f"{name}{size}") in run else "–" for size in sizes)


def experts(folder: Path) -> str:
    """Return the section on the experts of a layer alone."""
    name, run = newest_result(folder, "experts-")
    rows: dict[str, dict[int, float]] = {}
    for entry in run["experts"]:
        rows.setdefault(entry["shape"], {})[entry["tokens"]] = entry["copy_share"]
    tokens = sorted(next(iter(rows.values())))
    return section(
        "Experts alone",
        "A layer's experts, without shared ones: the bytes of the experts that a step of that many tokens chooses per"
        f" second, over the rate of a device copy. {run['hardware']['name']}, bfloat16.",
        table(
            ("tokens", *(f"{count:,}" for count in tokens)),
            ((shape, *(f"{shares[count]:.2f}" for count in tokens)) for shape, shares in rows.items()),
        ),
        "python -m benchmarks.kernels experts --save",
        [(name, run)],
    )


def latent(folder: Path) -> str:
    """Return the section on latent attention."""
    name, run = newest_result(folder, "latent-attention-")
    sizes = ("64x4096", "128x4096", "1x32768")
    return section(
        "Latent attention",
        "Decode attention of DeepSeek-V2-Lite's 16 heads over rows of that many cached tokens: the bytes of the latents"
        f" per second, over the rate of a device copy. {run['hardware']['name']}, bfloat16.",
        table(
            ("rows x tokens", *(size.replace("x", " x ") for size in sizes)),
            (
                ("attention", *(f"{run[f'latent_bw_ratio_{size}_h16']:.2f}" for size in sizes)),
                ("with its four products", *(f"{run[f'latent_whole_bw_ratio_{size}_h16']:.2f}" for size in sizes)),
            ),
        ),
        "python -m benchmarks.kernels latent --save",
        [(name, run)],
    )


def attention_forms(folder: Path) -> str:
    """Return the section on forms of attention; empty until a run is kept."""
    if not (runs := read_results(folder, "attention-forms-")):
        return ""
    name, run = runs[-1]
    overtakes = run["overtakes_products_at"]
    text = (
        f"One layer of {run['shape']}: attention of a prompt by the engine, by PyTorch's SDPA and with all scores "
        "stored, in ms and GiB, beside the matrix products of the layer. Attention takes longer than these "
        + (f"from {overtakes:,} tokens on." if overtakes else "at none of these lengths.")
        + f" Below: a decode step's attention in all layers, of {run['rows']} requests with {run['context']:,} tokens "
        f"each, and the time of a hand-over of such a request over {run['network_gbps']:g} Gb/s."
    )
    prompts = table(
        ("prompt tokens", "engine", "SDPA", "all scores stored", "products"),
        (
            (
                f"{row['tokens']:,}",
                *(
                    f"{row[f'{form}_ms']:.2f} ms, {row[f'{form}_gib']:.2f} GiB" if f"{form}_ms" in row else "–"
                    for form in ("engine", "sdpa", "naive")
                ),
                f"{row['products_ms']:.2f} ms",
            )
            for row in run["prompts"]
        ),
    )
    heads = table(
        ("heads", "KiB of KV a token", "attention of a step, ms", "hand-over, ms"),
        (
            (
                row["form"],
                f"{row['bytes_per_token'] / 1024:.0f}",
                f"{row['step_ms']:.2f}",
                f"{row['hand_over_ms']:.1f}",
            )
            for row in run["heads"]
        ),
    )
    title = f"Forms of attention: {run['hardware']['name']}"
    command = "python -m benchmarks.kernels forms --save"
    return section(title, text, [*prompts, "", *heads], command, [(name, run)])


def tile_order(folder: Path) -> str:
    """Return the section on the order of a product's tiles; empty until a run is kept."""
    if not (runs := read_results(folder, "tile-order-")):
        return ""
    name, run = runs[-1]
    text = (
        f"TFLOP/s of a Triton product with tiles of 128 x 256 x 64 in row-major order, in groups of {run['group']} "
        f"rows of tiles, and of cuBLAS, for the products of {run['shape']}."
    )
    lines = table(
        ("product", "tokens", "row-major", "grouped", "cuBLAS"),
        (
            (
                f"{row['product']}, {row['n']:,} x {row['k']:,}",
                f"{row['tokens']:,}",
                *(f"{row[f'{way}_tflops']:.0f}" for way in ("row_major", "grouped", "cublas")),
            )
            for row in run["rows"]
        ),
    )
    title = f"Order of tiles: {run['hardware']['name']}"
    return section(title, text, lines, "python -m benchmarks.kernels order --save", [(name, run)])
