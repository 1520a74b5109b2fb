"""Quantized checkpoints written element by element from the formats' tables, each with the weights that it stands for.

A writer takes a generator, N and K, and returns the tensors of one weight by their names after the module's, and the
weight in float32. None of it uses Tandem's code.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.factories import FAMILIES, write_tiny_model

Tensors = dict[str, torch.Tensor]
Writer = Callable[[np.random.Generator, int, int], tuple[Tensors, np.ndarray]]

GROUP = 32
WEIGHTS = "model.safetensors"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def put(words: np.ndarray, at: tuple[int, int], code: int, shift: int) -> None:
    """Writes a code into a word of 32 bits, so many bits from the lowest one."""
    words[at] |= code << shift


def int32(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


E2M1 = [sign * number for sign in (1.0, -1.0) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
"""The numbers of FP4 by their codes."""


def nvfp4(*, codes_name: str, factor_name: str, divided: bool) -> Writer:
    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        codes = rng.integers(0, 16, (n, k))
        scales = torch.from_numpy(rng.uniform(0.004, 440.0, (n, k // 16))).to(torch.float8_e4m3fn)
        by_group, factor = scales.double().numpy(), np.float32(rng.uniform(2e-5, 4e-5))
        weight = np.array(E2M1)[codes] * by_group.repeat(16, axis=1) * factor
        packed = codes[:, 0::2] | codes[:, 1::2] << 4
        stored = torch.tensor([1 / factor if divided else factor], dtype=torch.float32)
        names = {codes_name: torch.from_numpy(packed.astype(np.uint8)), "weight_scale": scales, factor_name: stored}
        return names, weight.astype(np.float32)

    return write


def mxfp4(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
    """Writes one expert's weight, whose tensors have no name of their own after the module's."""
    codes, exponents = rng.integers(0, 16, (n, k)), rng.integers(118, 124, (n, k // 32))
    weight = np.array(E2M1)[codes] * (2.0 ** (exponents - 127)).repeat(32, axis=1)
    blocks = codes[:, 0::2] | codes[:, 1::2] << 4
    bytes_of_blocks = torch.from_numpy(blocks.astype(np.uint8)).reshape(n, k // 32, 16)
    return {"_blocks": bytes_of_blocks, "_scales": torch.from_numpy(exponents.astype(np.uint8))}, weight.astype(
        np.float32
    )


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
"""The `quantization_config` of the published files of gpt-oss."""


def write_mxfp4(folder: Path, seed: int = 9, **changes: Any) -> tuple[Path, Path]:
    """Writes a gpt-oss folder in the published layout and its twin, which has the same experts as float32 numbers."""
    twin = write_tiny_model(folder / "twin", "gpt_oss", seed, **changes)
    tensors, rng = load_file(twin / WEIGHTS), np.random.default_rng(seed)
    quantized: Tensors = {}
    for name, stored in list(tensors.items()):
        if not name.endswith((".gate_up_proj", ".down_proj")):
            quantized[name] = stored
            continue
        count, columns, rows = stored.shape  # the plain layout is transposed
        experts = [mxfp4(rng, rows, columns) for _ in range(count)]
        quantized |= {name + part: torch.stack([parts[part] for parts, _ in experts]) for part in experts[0][0]}
        tensors[name] = torch.from_numpy(np.stack([weight.T.copy() for _, weight in experts]))
    save_file(tensors, twin / WEIGHTS)
    packed = folder / "quantized"
    packed.mkdir()
    save_file(quantized, packed / WEIGHTS)
    config = json.loads((twin / "config.json").read_text()) | {"quantization_config": MXFP4}
    (packed / "config.json").write_text(json.dumps(config))
    return packed, twin


def scales_of(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.01, 0.03, shape)).to(torch.float16)


def awq(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
    codes, zeros = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, k // GROUP))
    scales = scales_of(rng, k // GROUP, n)
    by_group = scales.double().numpy()
    qweight, qzeros = np.zeros((k, n // 8), np.int64), np.zeros((k // GROUP, n // 8), np.int64)
    weight = np.zeros((n, k), np.float32)
    for row in range(n):
        word, slot = row // 8, AWQ_ORDER.index(row % 8)
        for column in range(k):
            put(qweight, (column, word), int(codes[row, column]), 4 * slot)
            group = column // GROUP
            weight[row, column] = (codes[row, column] - zeros[row, group]) * by_group[group, row]
        for group in range(k // GROUP):
            put(qzeros, (group, word), int(zeros[row, group]), 4 * slot)
    return {"qweight": int32(qweight), "qzeros": int32(qzeros), "scales": scales}, weight


def gptq(*, bits: int = 4, sym: bool = False, v2: bool = False, act_order: bool = False) -> Writer:
    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        word, top = 32 // bits, 1 << bits
        codes = rng.integers(0, top, (n, k))
        zeros = np.full((n, k // GROUP), top // 2) if sym else rng.integers(0, top, (n, k // GROUP))
        scales = scales_of(rng, k // GROUP, n)
        by_group = scales.double().numpy()
        groups = rng.permutation(k) // GROUP if act_order else np.arange(k) // GROUP
        qweight, qzeros = np.zeros((k // word, n), np.int64), np.zeros((k // GROUP, n // word), np.int64)
        weight = np.zeros((n, k), np.float32)
        for row in range(n):
            for column in range(k):
                put(qweight, (column // word, row), int(codes[row, column]), bits * (column % word))
                group = groups[column]
                weight[row, column] = (codes[row, column] - zeros[row, group]) * by_group[group, row]
            for group in range(k // GROUP):
                stored = int(zeros[row, group]) if v2 else (int(zeros[row, group]) - 1) % top
                put(qzeros, (group, row // word), stored, bits * (row % word))
        tensors = {"qweight": int32(qweight), "qzeros": int32(qzeros), "scales": scales}
        return tensors | {"g_idx": torch.from_numpy(groups.astype(np.int32))}, weight

    return write


def packed_integers(*, bits: int = 4, sym: bool = True, group: int = GROUP, act_order: bool = False) -> Writer:
    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        word, half = 32 // bits, 1 << bits - 1
        size = group or k
        codes = rng.integers(-half, half, (n, k))
        zeros = np.zeros((n, k // size), np.int64) if sym else rng.integers(-half, half, (n, k // size))
        scales = scales_of(rng, n, k // size).to(torch.bfloat16)
        by_group = scales.double().numpy()
        groups = rng.permutation(k) // size if act_order else np.arange(k) // size
        packed = np.zeros((n, k // word), np.int64)
        points = np.zeros((-(-n // word), k // size), np.int64)
        weight = np.zeros((n, k), np.float32)
        for row in range(n):
            for column in range(k):
                put(packed, (row, column // word), int(codes[row, column]) + half, bits * (column % word))
                at = groups[column]
                weight[row, column] = (codes[row, column] - zeros[row, at]) * by_group[row, at]
            for at in range(k // size):
                put(points, (row // word, at), int(zeros[row, at]) + half, bits * (row % word))
        tensors = {"weight_packed": int32(packed), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
        if not sym:
            tensors["weight_zero_point"] = int32(points)
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, weight

    return write


def byte_codes(kind: str, strategy: str, *, block: int = 64, sym: bool = True, name: str = "weight_scale") -> Writer:
    def write(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        values = torch.from_numpy(rng.normal(0, 40, (n, k)))
        codes = values.round().clamp(-128, 127).to(torch.int8) if kind == "int" else values.to(torch.float8_e4m3fn)
        shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // block), -(-k // block))}[strategy]
        scales = torch.from_numpy(rng.uniform(0.0005, 0.001, shape)).to(torch.float32)
        zeros = torch.from_numpy(rng.integers(-9, 9, shape)).to(torch.int8)
        weight = np.zeros((n, k), np.float32)
        numbers, factors, points = (tensor.double().numpy() for tensor in (codes, scales, zeros))
        for row in range(n):
            for column in range(k):
                at = {"tensor": (0,), "channel": (row, 0), "block": (row // block, column // block)}[strategy]
                weight[row, column] = (numbers[row, column] - (0 if sym else points[at])) * factors[at]
        tensors = {"weight": codes, name: scales}
        return tensors | ({} if sym else {"weight_zero_point": zeros}), weight

    return write


def sparse(write: Writer) -> Writer:
    """Returns a writer of weights of which two of each four are zero, and not stored."""

    def changed(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        tensors, weight = write(rng, n, k)
        kept = rng.permuted(np.tile([True, True, False, False], (n * k // 4, 1)), axis=1).reshape(n, k)
        codes = tensors.pop("weight")
        compressed = torch.from_numpy(codes.view(torch.int8).numpy()[kept].reshape(n, k // 2)).view(codes.dtype)
        bitmask = torch.from_numpy(np.packbits(kept, axis=1, bitorder="little"))
        stored = {"compressed": compressed, "bitmask": bitmask, "shape": torch.tensor([[n], [k]])}
        return tensors | stored, np.where(kept, weight, np.float32(0))

    return changed


def without(write: Writer, *names: str, **more: torch.Tensor) -> Writer:
    """Returns a writer of the same weights without the tensors `names`, and with `more`."""

    def changed(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        tensors, weight = write(rng, n, k)
        return {name: tensor for name, tensor in tensors.items() if name not in names} | {
            name: tensor.clone() for name, tensor in more.items()
        }, weight

    return changed


def scalar_scale(write: Writer) -> Writer:
    """Returns a writer whose only scale has no dimension."""

    def changed(rng: np.random.Generator, n: int, k: int) -> tuple[Tensors, np.ndarray]:
        tensors, weight = write(rng, n, k)
        return tensors | {"weight_scale": tensors["weight_scale"].reshape(())}, weight

    return changed


def compressed_tensors(stored: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
    } | more


def integer_weights(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, "group_size": None} | more


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
BIT_MASK = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4", "targets": ["Linear"], "ignore": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "data_type": "int"}
MODELOPT_FP8 = without(scalar_scale(byte_codes("float", "tensor")), input_scale=torch.tensor(0.02))
PACKED = "pack-quantized"
GROUPS = {"group_size": GROUP}

CASES: dict[str, tuple[dict[str, Any], Writer]] = {
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        awq,
    ),
    "gptq asymmetric": (GPTQ, gptq()),
    "gptq symmetric": (GPTQ | {"sym": True}, gptq(sym=True)),
    "gptq symmetric, v2 zeros under the name of v1": (GPTQ | {"sym": True}, gptq(sym=True, v2=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(v2=True)),
    "gptq desc_act": (GPTQ | {"desc_act": True}, gptq(act_order=True)),
    "gptq 8 bits": (GPTQ | {"bits": 8}, gptq(bits=8)),
    "W4A16": (
        compressed_tensors(PACKED, integer_weights(4, "group", **GROUPS)),
        packed_integers(),
    ),
    "W4A16 asymmetric": (
        compressed_tensors(PACKED, integer_weights(4, "group", symmetric=False, **GROUPS)),
        packed_integers(sym=False),
    ),
    "W4A16 channel": (
        compressed_tensors(PACKED, integer_weights(4, "channel")),
        packed_integers(group=0),
    ),
    "W4A16 actorder": (
        compressed_tensors(PACKED, integer_weights(4, "group", actorder="group", **GROUPS)),
        packed_integers(act_order=True),
    ),
    "W8A16": (
        compressed_tensors(PACKED, integer_weights(8, "channel")),
        packed_integers(bits=8, group=0),
    ),
    "W8A8 int": (
        compressed_tensors("int-quantized", integer_weights(8, "channel")),
        byte_codes("int", "channel"),
    ),
    "W8A8 int asymmetric": (
        compressed_tensors("int-quantized", integer_weights(8, "channel", symmetric=False)),
        byte_codes("int", "channel", sym=False),
    ),
    "fp8 tensor": (
        compressed_tensors("float-quantized", FP8 | {"strategy": "tensor"}),
        byte_codes("float", "tensor"),
    ),
    "fp8 channel": (
        compressed_tensors("naive-quantized", FP8 | {"strategy": "channel"}),
        byte_codes("float", "channel"),
    ),
    "fp8 block": (
        compressed_tensors("float-quantized", FP8 | {"strategy": "block", "block_structure": [64, 64]}),
        byte_codes("float", "block"),
    ),
    "fp8 2:4 sparse": (
        compressed_tensors("float-quantized", FP8 | {"strategy": "channel"}, sparsity_config=BIT_MASK),
        sparse(byte_codes("float", "channel")),
    ),
    "W8A8 int 2:4 sparse": (
        compressed_tensors("int-quantized", integer_weights(8, "channel"), sparsity_config=BIT_MASK),
        sparse(byte_codes("int", "channel")),
    ),
    "deepseek fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [64, 64], "activation_scheme": "dynamic"},
        byte_codes("float", "block", name="weight_scale_inv"),
    ),
    "modelopt fp8": (
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "producer": {"name": "modelopt", "version": "0.33.1"},
            "ignore": ["lm_head", "*.mlp.gate"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        },
        MODELOPT_FP8,
    ),
    "modelopt fp8, a scale a row": (
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}},
        byte_codes("float", "channel"),
    ),
    "fbgemm_fp8": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        byte_codes("float", "channel"),
    ),
    "auto-round": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "autoround_version": "0.5.1"},
        without(gptq(sym=True), "g_idx"),
    ),
    "auto-round asymmetric": (
        AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "sym": False},
        without(gptq(), "g_idx"),
    ),
    "auto-round with zero points as they are": (
        AUTO_ROUND | {"packing_format": "auto_round:gptqmodel", "sym": False},
        without(gptq(v2=True), "g_idx"),
    ),
    "modelopt nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]},
        nvfp4(codes_name="weight", factor_name="weight_scale_2", divided=False),
    ),
    "nvfp4-pack-quantized": (
        compressed_tensors(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
        ),
        nvfp4(codes_name="weight_packed", factor_name="weight_global_scale", divided=True),
    ),
    "fp8 of one scale": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        byte_codes("float", "tensor"),
    ),
}
"""Each format with its `quantization_config`."""


def is_quantized(name: str, stored: torch.Tensor) -> bool:
    """Returns True for the weights of linear layers that tools quantize."""
    plain = ("embed", "lm_head", ".gate.weight", "shared_expert_gate", "eh_proj", "input_proj")
    return name.endswith("_proj.weight") and stored.dim() == 2 and not any(part in name for part in plain)


def write_quantized(folder: Path, case: str, family: str = "llama3", **changes: Any) -> tuple[Path, Path]:
    """Writes a quantized folder and its twin, which has the same weights dequantized to float32."""
    twin = write_tiny_model(folder / "twin", family, **({"num_hidden_layers": 2} | changes))
    assert family in FAMILIES
    return quantize_folder(twin, folder / "quantized", case), twin


def quantize_folder(twin: Path, packed: Path, case: str) -> Path:
    """Writes a quantized folder, and changes the weights of its twin to the dequantized ones; returns the folder."""
    quantization, write = CASES[case]
    tensors, rng = load_file(twin / WEIGHTS), np.random.default_rng(5)
    quantized: Tensors = {}
    for name, stored in list(tensors.items()):
        if not is_quantized(name, stored):
            quantized[name] = stored
            continue
        parts, weight = write(rng, *stored.shape)
        quantized |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
        tensors[name] = torch.from_numpy(weight)
    save_file(tensors, twin / WEIGHTS)
    packed.mkdir()
    save_file(quantized, packed / WEIGHTS)
    config = json.loads((twin / "config.json").read_text()) | {"quantization_config": quantization}
    (packed / "config.json").write_text(json.dumps(config))
    return packed
