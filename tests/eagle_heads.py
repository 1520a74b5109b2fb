"""Folders of EAGLE heads with random weights, in the layout of published checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 16, 48


def write_eagle(
    folder: Path,
    hidden: int,
    vocabulary: int,
    *,
    tokens: list[int] | None = None,
    bias: bool = True,
    without: str = "",
    shapes: dict[str, tuple[int, ...]] | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a folder with an EAGLE head.

    The head can propose only `tokens`. `without` names a tensor that is left out, `shapes` changes or adds tensors, and
    `config` changes config.json.
    """
    rng = np.random.default_rng(seed)
    shape = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM}
    heads, kv_heads, dim = ((shape | config)[name] for name in shape)
    layer = "layers.0."
    of_tensors: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, hidden),
        "fc.weight": (hidden, 2 * hidden),
        f"{layer}self_attn.q_proj.weight": (heads * dim, hidden),
        f"{layer}self_attn.k_proj.weight": (kv_heads * dim, hidden),
        f"{layer}self_attn.v_proj.weight": (kv_heads * dim, hidden),
        f"{layer}self_attn.o_proj.weight": (hidden, heads * dim),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}mlp.gate_proj.weight": (WIDTH, hidden),
        f"{layer}mlp.up_proj.weight": (WIDTH, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, WIDTH),
    }
    if bias:
        of_tensors["fc.bias"] = (hidden,)
    of_tensors |= shapes or {}
    of_tensors.pop(without, None)
    tensors: dict[str, Any] = {
        name: (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32) for name, shape in of_tensors.items()
    }
    described: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": WIDTH,
        **shape,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "bias": bias,
    }
    if tokens is not None:
        described["draft_vocab_size"] = len(tokens)
        tensors["d2t"] = np.array(tokens, dtype=np.int64) - np.arange(len(tokens))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described | config))
    save_file(tensors, folder / "model.safetensors")
    return folder
