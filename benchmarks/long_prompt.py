"""Measures one long prompt on a GPU: `python -m benchmarks.long_prompt --shape llama-3.1-8b --tokens 131000 --save`.

The prompt is computed in chunks of the default step size, as a worker computes it when nothing else runs. Weights are
random. The ceiling is a matrix product of 8,192³, measured after the prompt. The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.command_line import exit_on_error, need_gpu
from benchmarks.gpu.ceilings import matrix_rate
from benchmarks.results import run_facts, save_result
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.shapes import shape_names, write_shape
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.weights.gguf import default_cache
from tandem.protocol.kv_pages import FREED, KvPages, held_pages
from tandem.protocol.messages import SamplingParams

_GREEDY = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_prompt", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=shape_names())
    parser.add_argument("--tokens", type=int, default=131_000, help="of the prompt")
    parser.add_argument("--step-tokens", type=int, default=EngineConfig(Path()).max_step_tokens, help="of a chunk")
    parser.add_argument("--kv-gb", type=float, default=None, help="size of the KV pool in 10⁹ bytes")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    return parser.parse_args(arguments)


class _Pages:
    """The pages of one request, without those that no chunk sees any more."""

    def __init__(self, kv: KvPages, pages: int) -> None:
        self._kv = kv
        self._free = list(range(pages))
        self._pages: list[int] = []
        self.most = 0
        """The most pages that it held at a time."""

    def of(self, start: int, end: int) -> list[int]:
        """Returns the entries for a chunk from position `start` to `end`."""
        kv, pages = self._kv, self._pages
        for entry in kv.dead(pages, start):
            self._free.append(pages[entry])
            pages[entry] = FREED
        pages += [FREED] * (kv.numbers(end) * kv.groups - len(pages))
        for entry in kv.seen(start, start // kv.page_tokens, kv.numbers(end)):
            if pages[entry] == FREED:
                pages[entry] = self._free.pop()
        self.most = max(self.most, len(held_pages(pages)))
        return pages


def measure(runner: ModelRunner, tokens: int, step_tokens: int) -> dict[str, object]:
    """Computes a prompt of random tokens twice, the first time to compile; returns the seconds of the second."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, runner.spec.vocab_size, (tokens,), generator=generator).tolist()
    seconds, most = 0.0, 0
    for ids in (prompt[: 2 * step_tokens], prompt):
        torch.cuda.synchronize()
        started = time.perf_counter()
        pages = _Pages(runner.kv_pages, runner.cache.pages)
        for start in range(0, len(ids), step_tokens):
            chunk = ids[start : start + step_tokens]
            last = start + step_tokens >= len(ids)
            row = StepRow(chunk, start, pages.of(start, start + len(chunk)), _GREEDY if last else None)
            runner.run(StepBatch([row]))
        seconds, most = time.perf_counter() - started, pages.most
    sizes = runner.roofline.sizes
    pairs = tokens * (tokens + 1) / 2
    flops = 2 * (sizes.weights - sizes.output_weights) * tokens + sizes.attention_flop_per_pair * pairs
    return {"seconds": round(seconds, 3), "flops": flops, "pages": most}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the prompt, and prints the result as JSON last."""
    chosen = parse_arguments(arguments)
    with exit_on_error():
        need_gpu()
        config = EngineConfig(
            write_shape(chosen.shape, default_cache() / f"shape-{chosen.shape}"),
            device=chosen.device,
            dtype="bfloat16",
            random_weights=True,
            max_step_tokens=chosen.step_tokens,
            kv_cache_bytes=None if chosen.kv_gb is None else int(chosen.kv_gb * 1e9),
        )
        runner = ModelRunner.load(config)
        found = measure(runner, min(chosen.tokens, runner.facts.max_context), chosen.step_tokens)
    ceiling = matrix_rate()
    result = found | {
        "shape": chosen.shape,
        "tokens": chosen.tokens,
        "step_tokens": chosen.step_tokens,
        "kv_gb": round(runner.cache.pages * runner.cache.page_bytes / 1e9, 2),
        "matmul_tflops": round(ceiling / 1e12, 1),
        "dtype": "bfloat16",
        **run_facts(chosen.device),
    }
    print(f"{chosen.tokens} tokens in {found['seconds']} s to the first token", flush=True)
    if chosen.save:
        print("saved", save_result(f"long-prompt-{chosen.shape}", result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
