"""Compares a model's predictions with those of the same model in 16 or 32 bits: `python -m benchmarks.quality MODEL`.

Candidate and reference read the same text, which calibration never uses (`tandem/cli/quantization/sample_text.py`). The
benchmark reports the mean KL(reference ‖ candidate), the agreement of the most likely tokens and both perplexities, for
positions scored in prefill and in decode steps, and how many numbers hidden in long texts each model finds.
"""

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.command_line import Measured, at_least
from benchmarks.quality.needle import DEPTHS, found_needles, make_needles
from benchmarks.results import run_facts
from router.text.tokenizer import Tokenizer
from tandem.cli.quantization.quality_view import quality_table
from tandem.cli.quantization.sample_text import sample_text, text_hash, token_samples
from tandem.engine.config import EngineConfig
from tandem.engine.config.quantization import AT_LOAD
from tandem.engine.models.load_spec import load_spec
from tandem.engine.quality.loading import load_for_comparison
from tandem.engine.quality.teacher_forced import COMPANY, compare
from tandem.engine.weights.gguf import prepare_model

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_NEEDLES = (4096, 16384, 32768)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("model", type=Path, help="the reference: Hugging Face folder or GGUF file")
    parser.add_argument("--candidate", type=Path, help="the model that is compared (the reference's own folder)")
    parser.add_argument("--dtype", choices=_DTYPES, default="auto", help="of the candidate (auto)")
    parser.add_argument("--quantization", choices=AT_LOAD, help="of the candidate's 16-bit weights, at load")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of the candidate: auto, int8 or fp8 (auto)")
    parser.add_argument("--reference-dtype", choices=_DTYPES, default="auto", help="(auto)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    parser.add_argument("--samples", type=at_least(1), default=32, help="pieces of the text (32)")
    parser.add_argument("--tokens", type=at_least(4), default=512, help="tokens of a piece (512)")
    parser.add_argument(
        "--needle",
        type=lambda text: [at_least(256)(length) for length in text.split(",") if length],
        default=list(_NEEDLES),
        help="lengths in tokens of the texts that hide a number (4096,16384,32768; '' = none)",
    )
    parser.add_argument("--max-step-tokens", type=at_least(1), default=2048, help="prompt tokens of a step (2048)")


def measure(chosen: argparse.Namespace) -> Measured:
    """Load both engines, compare them, and print the tables."""
    console = Console()
    folder = prepare_model(chosen.model)
    # A GGUF file is served from its own codes; the reference is the same file in float32.
    candidate_folder = folder if chosen.candidate is None else prepare_model(chosen.candidate, codes=True)
    context = load_spec(folder).max_context
    lengths = [tokens for tokens in chosen.needle if tokens < context]
    if skipped := [str(tokens) for tokens in chosen.needle if tokens >= context]:
        console.print(f"no needles in {', '.join(skipped)} tokens: the model's context is {context} tokens.")
    tokens = max([chosen.tokens * min(COMPANY, chosen.samples), *lengths])
    reference = load_for_comparison(_config(chosen, folder, chosen.reference_dtype), tokens)
    packed = {"quantization": chosen.quantization, "kv_cache_dtype": chosen.kv_cache_dtype}
    candidate = load_for_comparison(replace(_config(chosen, candidate_folder, chosen.dtype), **packed), tokens)
    tokenizer, text = Tokenizer(folder), sample_text("evaluation")
    samples = token_samples(tokenizer.encode, text, chosen.samples, chosen.tokens)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("comparing", total=1.0)
        quality = compare(reference, candidate, samples, lambda done: progress.update(task, completed=done))
    console.print(quality_table(quality))
    needles: dict[str, dict[str, int]] = {}
    for length in lengths:
        made = make_needles(tokenizer.encode, text, length)
        counts = {
            name: found_needles(runner, tokenizer.decode, made, chosen.max_step_tokens)
            for name, runner in (("reference", reference), ("candidate", candidate))
        }
        needles[str(length)] = counts
        console.print(
            f"numbers found in {length:,} tokens: {counts['candidate']} of {len(DEPTHS)}, "
            f"by the reference {counts['reference']}"
        )
    result: dict[str, object] = {
        "model": folder.name,
        "candidate": candidate_folder.name,
        "reference_dtype": reference.facts.dtype,
        "dtype": candidate.facts.dtype,
        **packed,
        "text": text_hash(text),
        "samples": chosen.samples,
        "tokens": chosen.tokens,
        "prefill": asdict(quality.prefill),
        "decode": asdict(quality.decode),
        "needles": needles,
        "needles_of": len(DEPTHS),
        **run_facts(chosen.device),
    }
    return f"quality-{folder.name}", result


def _config(chosen: argparse.Namespace, folder: Path, dtype: str) -> EngineConfig:
    return EngineConfig.of(folder, device=chosen.device, dtype=dtype, max_step_tokens=chosen.max_step_tokens)
