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
    third: bool = False,
    prefix: str = "layers.0.",
    without: str = "",
    shapes: dict[str, tuple[int, ...]] | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a folder with an EAGLE-1 head, or an EAGLE-3 head if it is the `third`, whose layer has the `prefix`.

    The head can propose only `tokens`. `without` names a tensor that is left out, `shapes` changes or adds tensors, and
    `config` changes config.json.
    """
    rng = np.random.default_rng(seed)
    shape = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM}
    heads, kv_heads, dim = ((shape | config)[name] for name in shape)
    layer, read = prefix, 2 * hidden if third else hidden
    of_tensors: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocabulary, hidden),
        "fc.weight": (hidden, 2 * hidden),
        f"{layer}self_attn.q_proj.weight": (heads * dim, read),
        f"{layer}self_attn.k_proj.weight": (kv_heads * dim, read),
        f"{layer}self_attn.v_proj.weight": (kv_heads * dim, read),
        f"{layer}self_attn.o_proj.weight": (hidden, heads * dim),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}mlp.gate_proj.weight": (WIDTH, hidden),
        f"{layer}mlp.up_proj.weight": (WIDTH, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, WIDTH),
    }
    if third:
        of_tensors["fc.weight"] = (hidden, 3 * hidden)
        of_tensors |= dict.fromkeys((f"{layer}input_layernorm.weight", f"{layer}hidden_norm.weight"), (hidden,))
        of_tensors |= {"norm.weight": (hidden,), "lm_head.weight": (len(tokens or range(vocabulary)), hidden)}
    elif bias:
        of_tensors["fc.bias"] = (hidden,)
    of_tensors |= shapes or {}
    of_tensors.pop(without, None)
    tensors: dict[str, Any] = {
        name: (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32) for name, shape in of_tensors.items()
    }
    described: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if third else "LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "intermediate_size": WIDTH,
        **shape,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocabulary,
        "bias": bias and not third,
    }
    if tokens is not None:
        described["draft_vocab_size"] = len(tokens)
        tensors["d2t"] = np.array(tokens, dtype=np.int64) - np.arange(len(tokens))
        if third:
            tensors["t2d"] = np.isin(np.arange(vocabulary), tokens)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described | config))
    save_file(tensors, folder / "model.safetensors")
    return folder
