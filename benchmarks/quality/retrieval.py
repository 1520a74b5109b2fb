"""Needle retrieval in long contexts by a constructed model: `python -m benchmarks.quality retrieval`.

No model that is small enough for a CPU answers questions about 32,768 tokens. Two layers of one head can copy the token
that followed an earlier occurrence of a token (an induction head, arXiv:2209.11895), exactly and at any distance, with
constructed instead of trained weights. An answer is therefore wrong only if keys or values are wrong: read from a wrong
position, with a wrong scale, or too coarsely quantized. As in trained models, one coordinate of the second layer's keys
is `OUTLIER` times as large as the others, which makes 8-bit quantization difficult.

16-bit and quantized KV answer the same prompts in one run.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.command_line import Measured, at_least
from benchmarks.quality.needle import DEPTHS, Needles, found_needles
from benchmarks.results import run_facts
from tandem.engine.config import EngineConfig
from tandem.engine.quality.loading import load_for_comparison

VOCAB = 512
NUMBER_TOKENS = 6
KEY = 3
"""The token in front of the number, repeated at the end of the prompt."""
FIRST_DIGIT, FIRST_HAY = 4, 32
"""First token id of the numbers' digits, and first token id of the surrounding text."""
OUTLIER = 8.0
HIDDEN, HEAD_DIM = 128, 64
ROPE_THETA = 1e12
"""RoPE's base: so large that half of a head's coordinate pairs hardly rotate within 65,536 positions."""
_HALF = HEAD_DIM // 2
_TURNING = 14
"""Number of coordinate pairs of a head that RoPE rotates and that find the previous position; others compare tokens."""
_CODE = 2 * (_HALF - _TURNING)
"""The number of coordinates of a token's code, each 1 or -1."""
_TOKEN, _BEFORE, _ONE, _COPIED = 0, _CODE, 2 * _CODE, 2 * _CODE + 1
"""First coordinates in the hidden state of the token's code, the previous token's code, a 1, and the answer."""
_ALIKE = 12
"""Maximum dot product of the codes of two tokens, at least one of which has an id below `FIRST_HAY`."""
_SHARPNESS_BEFORE, _SHARPNESS_SAME = 16.0, 1.0
"""The attention score that each rotating pair (layer 1) or each coordinate of a code (layer 2) adds.

The attention weights of other positions are then below e^-9 and e^-20.
"""
_CONTEXT = 65_536


def write_retrieval_model(folder: Path) -> Path:
    """Write the model in Hugging Face layout, without a tokenizer, and return its folder."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": HEAD_DIM, "max_position_embeddings": _CONTEXT, "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in _weights().items()}, folder / "model.safetensors")
    return folder


def _weights() -> dict[str, Tensor]:
    codes = _token_codes()
    embedding, head = torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB, HIDDEN)
    embedding[:, _TOKEN:_BEFORE], embedding[:, _ONE] = codes, 1.0
    head[:, _COPIED : _COPIED + _CODE] = codes
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}
    for layer, projections in enumerate((_position_before(), _same_token())):
        name = f"model.layers.{layer}."
        tensors |= {f"{name}self_attn.{part}_proj.weight": projection for part, projection in projections.items()}
        tensors |= {f"{name}mlp.{part}_proj.weight": torch.zeros(HIDDEN, HIDDEN) for part in ("gate", "up", "down")}
        tensors |= {f"{name}{part}_layernorm.weight": torch.ones(HIDDEN) for part in ("input", "post_attention")}
    return tensors


def _token_codes() -> Tensor:
    """Return codes [vocab, _CODE] of 1 and -1; those of tokens before `FIRST_HAY` are dissimilar to all others."""
    generator, codes = torch.Generator().manual_seed(0), torch.zeros(0, _CODE)
    while len(codes) < VOCAB:
        code = torch.randint(2, (_CODE,), generator=generator) * 2.0 - 1
        if not (codes[:FIRST_HAY] @ code > _ALIKE).any():
            codes = torch.cat([codes, code[None]])
    return codes


def _position_before() -> dict[str, Tensor]:
    """Return the first layer's projections, by which each token attends to the previous one and copies its code.

    With queries (1, 0) and keys (cos t, sin t) in a pair of frequency t, the score of a token d positions back is cos(t
    (d-1)).
    """
    # After the norm, each coordinate of a hidden state with _CODE + 1 coordinates of 1 and -1 has this size.
    size = math.sqrt(HIDDEN / (_CODE + 1))
    frequencies = ROPE_THETA ** (-torch.arange(_TURNING) / _HALF)
    gain = math.sqrt(_SHARPNESS_BEFORE * math.sqrt(HEAD_DIM)) / size
    q, k, v, o = _empty()
    q[:_TURNING, _ONE] = gain
    k[:_TURNING, _ONE], k[_HALF : _HALF + _TURNING, _ONE] = gain * frequencies.cos(), gain * frequencies.sin()
    v[:_CODE, _TOKEN:_BEFORE] = torch.eye(_CODE) / size
    o[_BEFORE:_ONE, :_CODE] = torch.eye(_CODE)
    return {"q": q, "k": k, "v": v, "o": o}


def _same_token() -> dict[str, Tensor]:
    """Return the second layer's projections.

    A token attends to the tokens that followed its earlier occurrences, and copies their code.
    """
    size = math.sqrt(HIDDEN / (2 * _CODE + 1))
    gain = math.sqrt(_SHARPNESS_SAME * math.sqrt(HEAD_DIM)) / size
    slow = torch.cat([torch.arange(_TURNING, _HALF), torch.arange(_HALF + _TURNING, HEAD_DIM)])
    q, k, v, o = _empty()
    q[slow, _TOKEN:_BEFORE] = torch.eye(_CODE) * gain
    k[slow, _BEFORE:_ONE] = torch.eye(_CODE) * gain
    k[0, _ONE] = OUTLIER * gain
    v[:_CODE, _TOKEN:_BEFORE] = torch.eye(_CODE) / size
    o[_COPIED : _COPIED + _CODE, :_CODE] = torch.eye(_CODE)
    return {"q": q, "k": k, "v": v, "o": o}


def _empty() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *(torch.zeros(HEAD_DIM, HIDDEN) for _ in range(3)), torch.zeros(HIDDEN, HEAD_DIM)  # type: ignore[return-value]


def retrieval_needles(tokens: int) -> Needles:
    """Return a prompt of `tokens` random token ids for each of `DEPTHS`.

    Each prompt contains the key followed by a number.
    """
    prompts, numbers = [], []
    for index, depth in enumerate(DEPTHS):
        generator = torch.Generator().manual_seed(tokens + index)
        free = tokens - NUMBER_TOKENS - 2
        hay = torch.randint(FIRST_HAY, VOCAB, (free,), generator=generator).tolist()
        number = (FIRST_DIGIT + torch.randperm(FIRST_HAY - FIRST_DIGIT, generator=generator)[:NUMBER_TOKENS]).tolist()
        cut = int(depth * free)
        prompts.append([*hay[:cut], KEY, *number, *hay[cut:], KEY])
        numbers.append(said(number))
    return Needles(prompts, numbers)


def said(token_ids: Sequence[int]) -> str:
    """Return token ids as text, because the model has no tokenizer."""
    return " ".join(f"<{token_id}>" for token_id in token_ids)


def count_found(
    lengths: Sequence[int], kv_cache_dtypes: Sequence[str], device: str, dtype: str, chunk: int
) -> dict[str, dict[str, int]]:
    """Return how many of `len(DEPTHS)` numbers were found, by prompt length and KV dtype."""
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_retrieval_model(Path(folder))
        for kv_cache_dtype in kv_cache_dtypes:
            config = EngineConfig.of(
                model, device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype, max_step_tokens=chunk
            )
            runner = load_for_comparison(config, max(lengths))
            for length in lengths:
                began = time.monotonic()
                count = found_needles(runner, said, retrieval_needles(length), chunk)
                counts.setdefault(str(length), {})[kv_cache_dtype] = count
                took_s = time.monotonic() - began
                print(f"{length:,} tokens, KV {kv_cache_dtype}: {count} of {len(DEPTHS)} numbers, {took_s:.0f} s")
    return counts


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument(
        "--lengths",
        type=lambda text: [at_least(64)(length) for length in text.split(",")],
        default=[4096, 16384, 32768],
        help="tokens of the prompts (4096,16384,32768)",
    )
    parser.add_argument("--kv-cache-dtypes", type=lambda text: text.split(","), default=["auto", "int8"])
    parser.add_argument("--dtype", default="bfloat16", help="of weights and of KV that is not quantized (bfloat16)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (cpu)")
    parser.add_argument("--max-step-tokens", type=at_least(1), default=2048, help="prompt tokens of a step (2048)")


def measure(options: argparse.Namespace) -> Measured:
    """Count the numbers found with each KV dtype."""
    counts = count_found(
        options.lengths, options.kv_cache_dtypes, options.device, options.dtype, options.max_step_tokens
    )
    result = {"model": "retrieval", "dtype": options.dtype, "needles": counts, "needles_of": len(DEPTHS)}
    return "retrieval", result | run_facts(options.device)
