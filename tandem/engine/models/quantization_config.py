"""Reads `quantization_config` from config.json, in the format of each quantization tool.

Raises ModelError, which names the scheme, if a scheme is not supported.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tandem.engine.config.quantization import Codes, Quantization, WeightFormat, WeightScheme
from tandem.protocol.errors import ModelError

Json = Mapping[str, Any]

_EVERY = ".*"
_EMBEDDING = "model.embed_tokens"
_OUTPUT = "lm_head"
_BITS = {4: Codes.INT4, 8: Codes.INT8}
_PACKED, _FLOAT, _INT = WeightFormat.PACK_QUANTIZED, WeightFormat.FLOAT_QUANTIZED, WeightFormat.INT_QUANTIZED
_NVFP4_PACKED = WeightFormat.NVFP4_PACK_QUANTIZED
_BIT_MASK = "sparse-24-bitmask"
"""The form of compressed-tensors in which 2:4 sparse weights are stored without their zeros."""
GGUF_SCHEMES = {
    "Q8_0": WeightScheme(WeightFormat.Q8_0, Codes.INT8, 32),
    "Q4_0": WeightScheme(WeightFormat.Q4_0, Codes.INT4, 32),
    "Q4_1": WeightScheme(WeightFormat.Q4_1, Codes.INT4, 32, symmetric=False),
    "Q4_K": WeightScheme(WeightFormat.Q4_K, Codes.INT4, 32, symmetric=False),
    "Q6_K": WeightScheme(WeightFormat.Q6_K, Codes.INT8, 16),
    "MXFP4": WeightScheme(WeightFormat.MXFP4_BLOCKS, Codes.FLOAT4, 32),
}
"""The block types of GGUF whose codes can be kept; weights of other types are dequantized during conversion."""
_SERVED = "awq, gptq, compressed-tensors, fp8, mxfp4, modelopt, fbgemm_fp8 and auto-round"
_STACKED_EXPERTS = r".*\.mlp\.experts\.(gate_up|down)_proj"
"""The modules that MXFP4 quantizes: those of gpt-oss in which the experts of a layer are stacked."""
_AUTO_ROUND_GPTQ = {
    "auto_round:auto_gptq": WeightFormat.GPTQ,
    "auto_round:gptqmodel": WeightFormat.GPTQ_V2,
    "auto_round": WeightFormat.GPTQ_V2,
}
"""The packings of AutoRound that equal GPTQ's; the two differ in how zero points are stored."""
_MODELOPT = {
    "FP8": WeightScheme(_FLOAT, Codes.FLOAT8, quantized_inputs=True),
    "FP8_PER_CHANNEL_PER_TOKEN": WeightScheme(_FLOAT, Codes.FLOAT8, quantized_inputs=True),
    "NVFP4": WeightScheme(WeightFormat.NVFP4, Codes.FLOAT4, 16),
}
"""The formats of ModelOpt by `quant_algo`; FP8 has one scale per weight matrix, or one scale per row."""


def parse_quantization(config: Json) -> Quantization:
    """Return the quantization that a `quantization_config` describes.

    Raises ModelError, which names the scheme, if it is not supported.
    """
    # Files exported by ModelOpt may name only the tool that wrote them.
    method = config.get("quant_method") or (config.get("producer") or {}).get("name")
    readers: dict[object, Callable[[Json], Quantization]] = {
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _compressed_tensors,
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "modelopt": _modelopt,
        "fbgemm_fp8": _fbgemm_fp8,
        "auto-round": _auto_round,
        "gguf": _gguf,
    }
    if method not in readers:
        raise refusal(str(method), f"which is not supported; {_SERVED} are")
    return readers[method](config)


def refusal(scheme: str, reason: str) -> ModelError:
    """Return the error for a quantized checkpoint that cannot be served."""
    return ModelError(f"the checkpoint is quantized ({scheme}), {reason}; use another one, or one in 16 bits.")


def _awq(config: Json) -> Quantization:
    version = str(config.get("version") or "gemm").lower()
    if version != "gemm":
        raise refusal(f"awq, version {version}", "whose order of codes is not supported; gemm is")
    bits = int(config.get("bits") or config.get("w_bit") or 4)
    if bits != 4:
        raise refusal(f"awq, {bits} bits", "which is not supported; 4 bits are")
    group = _group("awq", config.get("group_size", config.get("q_group_size", 128)))
    scheme = WeightScheme(WeightFormat.AWQ, Codes.INT4, group, symmetric=False)
    return Quantization("awq", ((_EVERY, scheme),), _plain(config, _EMBEDDING, _OUTPUT))


def _gptq(config: Json) -> Quantization:
    bits = int(config["bits"])
    if bits not in _BITS:
        raise refusal(f"gptq, {bits} bits", "which is not supported; 4 and 8 bits are")
    if config.get("dynamic") and any(not str(pattern).startswith("-:") for pattern in config["dynamic"]):
        raise refusal("gptq, dynamic", "whose modules differ in their settings, which is not supported")
    stored = config.get("checkpoint_format") or "gptq"
    if stored not in {WeightFormat.GPTQ, WeightFormat.GPTQ_V2}:
        raise refusal(f"gptq, {stored}", "whose format is not supported; gptq and gptq_v2 are")
    scheme = WeightScheme(
        WeightFormat(stored),
        _BITS[bits],
        _group("gptq", config.get("group_size", 128)),
        symmetric=bool(config.get("sym", True)),
        scattered=bool(config.get("desc_act")) and not config.get("static_groups"),
    )
    skipped = tuple((_prefix(str(pattern).removeprefix("-:")), None) for pattern in config.get("dynamic") or ())
    plain = _plain(config, _EMBEDDING, *(() if config.get("lm_head") else (_OUTPUT,)))
    return Quantization("gptq", (*skipped, (_EVERY, scheme)), plain)


def _fp8(config: Json) -> Quantization:
    if (fmt := config.get("fmt") or "e4m3") != "e4m3":
        raise refusal(f"fp8, {fmt}", "which is not supported; e4m3 is")
    # Both of its possible values, static and dynamic, mean 8-bit activations.
    scheme = WeightScheme(_FLOAT, Codes.FLOAT8, quantized_inputs=bool(config.get("activation_scheme")))
    if config.get("weight_block_size"):
        rows, columns = _block("fp8", "weight_block_size", config["weight_block_size"])
        scheme = replace(scheme, format=WeightFormat.FP8_BLOCKS, group=columns, block_rows=rows)
    return Quantization("fp8", ((_EVERY, scheme),), _plain(config, _EMBEDDING, _OUTPUT))


def _mxfp4(config: Json) -> Quantization:
    scheme = WeightScheme(WeightFormat.MXFP4, Codes.FLOAT4, 32)
    excluded = config.get("modules_to_not_convert") or ()
    skipped = tuple((_wildcards(str(module)) + r"(\..*)?", None) for module in excluded)
    return Quantization("mxfp4", (*skipped, (_STACKED_EXPERTS, scheme)))


def _modelopt(config: Json) -> Quantization:
    """Read ModelOpt's settings: those in config.json, or those under `quantization` in hf_quant_config.json."""
    settings = config.get("quantization") or config
    algorithm = str(settings.get("quant_algo") or "").upper()
    if algorithm not in _MODELOPT:
        served = ", ".join(_MODELOPT)
        raise refusal(f"modelopt, {algorithm or 'no quant_algo'}", f"which is not supported; {served} are")
    scheme = _MODELOPT[algorithm]
    group = settings.get("group_size")
    if scheme.group is not None and group is not None and int(group) != scheme.group:
        raise refusal(f"modelopt, {algorithm}, group_size {group}", f"which is not supported; {scheme.group} is")
    excluded = [str(module) for module in settings.get("exclude_modules") or settings.get("ignore") or ()]
    skipped = tuple((_wildcards(module), None) for module in excluded if "*" in module)
    plain = frozenset({_EMBEDDING, _OUTPUT, *(module for module in excluded if "*" not in module)})
    return Quantization("modelopt", (*skipped, (_EVERY, scheme)), plain)


def _fbgemm_fp8(config: Json) -> Quantization:
    """Read FP8 with one scale per row; `activation_scale_ub`, an upper bound of activation scales, is ignored."""
    scheme = WeightScheme(_FLOAT, Codes.FLOAT8, quantized_inputs=True)
    return Quantization("fbgemm_fp8", ((_EVERY, scheme),), _plain(config, _EMBEDDING, _OUTPUT))


def _auto_round(config: Json) -> Quantization:
    """Read AutoRound's settings in GPTQ's packing.

    `extra_config` overrides the settings of some modules, which it gives by name or regular expression.
    """
    packing = config.get("packing_format") or config.get("backend")
    if packing not in _AUTO_ROUND_GPTQ or (config.get("data_type") or "int") != "int":
        packings = ", ".join(_AUTO_ROUND_GPTQ)
        stored = f"auto-round, {packing}, {config.get('data_type') or 'int'}"
        raise refusal(stored, f"which is not supported; int in {packings} is")
    base = {**config, "checkpoint_format": _AUTO_ROUND_GPTQ[str(packing)], "desc_act": False, "dynamic": None}
    rules: list[tuple[str, WeightScheme | None]] = []
    for module, own in (config.get("extra_config") or {}).items():
        scheme = None if int(own.get("bits") or config["bits"]) >= 16 else _gptq({**base, **own}).rules[-1][1]
        rules.append((re.escape(module) if re.fullmatch(r"[\w.-]+", module) else module, scheme))
    default = _gptq(base)
    return Quantization("auto-round", (*rules, *default.rules), default.plain)


def _gguf(config: Json) -> Quantization:
    """Read the settings that `tandem.engine.weights.gguf` writes: `types` lists the modules of each block type."""
    rules = []
    for kind, modules in config["types"].items():
        if kind not in GGUF_SCHEMES:
            raise refusal(f"gguf, {kind}", f"which is not supported; {', '.join(GGUF_SCHEMES)} are")
        rules.append(("|".join(map(re.escape, modules)), GGUF_SCHEMES[kind]))
    return Quantization("gguf", tuple(rules))


def _compressed_tensors(config: Json) -> Quantization:
    sparsity = (config.get("sparsity_config") or {}).get("format") or "dense"
    if sparsity not in {"dense", _BIT_MASK}:
        raise refusal(f"compressed-tensors, {sparsity}", f"whose sparsity is not supported; dense and {_BIT_MASK} are")
    if config.get("transform_config"):
        raise refusal("compressed-tensors, transform_config", "whose rotations are not supported")
    rules: list[tuple[str, WeightScheme | None]] = []
    plain = {_EMBEDDING}
    for ignored in config.get("ignore") or ():
        if ignored.startswith("re:"):
            rules.append((_prefix(ignored), None))
        else:
            plain.add(ignored)
    groups = config.get("config_groups")
    if not groups:
        raise refusal("compressed-tensors", "whose config_groups are missing")
    for group in groups.values():
        scheme = _scheme_of_group(group, group.get("format") or config.get("format"))
        if sparsity == _BIT_MASK:
            if scheme.format not in {_INT, _FLOAT}:
                raise refusal(
                    f"compressed-tensors, {_BIT_MASK}, {scheme.format}", f"which is not supported; {_INT}, {_FLOAT} are"
                )
            scheme = replace(scheme, sparse=True)
        rules += [(_target(target), scheme) for target in group.get("targets") or ["Linear"]]
    # Rules for named modules take precedence over rules for kinds of modules.
    rules.sort(key=lambda rule: rule[0] == _EVERY)
    return Quantization("compressed-tensors", tuple(rules), frozenset(plain))


def _scheme_of_group(group: Json, stored: object) -> WeightScheme:
    weights = group.get("weights") or {}
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy") or "tensor"
    name = f"compressed-tensors, {stored}"
    if stored == _NVFP4_PACKED:
        if (bits, kind, weights.get("group_size")) != (4, "float", 16):
            described = f"{name}, {kind}{bits}, group_size {weights.get('group_size')}"
            raise refusal(described, "which is not supported; float4 in groups of 16 is")
        return WeightScheme(_NVFP4_PACKED, Codes.FLOAT4, 16)
    if bits not in _BITS or kind not in {"int", "float"} or (bits, kind) == (4, "float"):
        raise refusal(f"{name}, {kind}{bits}", "which is not supported; int4, int8 and float8 are")
    codes = _BITS[bits] if kind == "int" else Codes.FLOAT8
    formats = {_PACKED: {Codes.INT4, Codes.INT8}, _INT: {Codes.INT8}, _FLOAT: {Codes.FLOAT8}}
    weight_format = (_FLOAT if kind == "float" else _INT) if stored == "naive-quantized" else stored
    if weight_format not in formats or codes not in formats[WeightFormat(str(weight_format))]:
        raise refusal(f"{name}, {codes}", f"whose format is not supported; {', '.join(formats)} are")
    if strategy not in {"tensor", "channel", "group", "block"}:
        raise refusal(f"{name}, strategy {strategy}", "which is not supported")
    columns, block_rows = weights.get("group_size"), 1
    if strategy == "block":
        block_rows, columns = _block(name, "block_structure", weights.get("block_structure"))
    return WeightScheme(
        WeightFormat(str(weight_format)),
        codes,
        _group(name, columns) if strategy in {"group", "block"} else None,
        block_rows,
        symmetric=bool(weights.get("symmetric", True)),
        scattered=weights.get("actorder") in {"group", "dynamic", True},
        quantized_inputs=_quantizes_inputs(weights, group.get("input_activations") or {}),
    )


def _quantizes_inputs(weights: Json, inputs: Json) -> bool:
    """Return True if activations are quantized to 8-bit codes of the weights' type.

    Activations with other settings stay in 16 bits, which is more accurate.
    """
    types = {(settings.get("num_bits"), settings.get("type") or "int") for settings in (weights, inputs)}
    return types in ({(8, "int")}, {(8, "float")})


def _block(scheme: str, name: str, size: object) -> tuple[int, int]:
    """Return the rows and columns of a block; `size` is two numbers or a string such as `128x128`.

    Raises ModelError if one is below 1.
    """
    parts = size.split("x") if isinstance(size, str) else size
    if not isinstance(parts, list) or len(parts) != 2 or min(sizes := [int(part) for part in parts]) < 1:
        raise refusal(f"{scheme}, {name} {size}", "which is not the size of a block, two numbers from 1 on")
    return sizes[0], sizes[1]


def _group(scheme: str, size: object) -> int | None:
    """Return the number of columns that share a scale; None for -1. Raises ModelError for other numbers below 1."""
    columns = -1 if size is None else int(str(size))
    if columns < 1 and columns != -1:
        raise refusal(f"{scheme}, group_size {columns}", "which is no size of a group")
    return None if columns == -1 else columns


def _plain(config: Json, *names: str) -> frozenset[str]:
    """Return the names of modules that are not quantized: `names`, and those in `modules_to_not_convert`."""
    return frozenset({*names, *(config.get("modules_to_not_convert") or ())})


def _wildcards(pattern: str) -> str:
    """Convert a name in which `*` matches any text into a regular expression for whole names."""
    return ".*".join(map(re.escape, pattern.split("*")))


def _prefix(pattern: str) -> str:
    """Convert `re:pattern`, which matches the start of a name, into a regular expression for whole names."""
    return f"(?:{pattern.removeprefix('re:')}).*"


def _target(target: str) -> str:
    if target.startswith("re:"):
        return _prefix(target)
    return _EVERY if target == "Linear" else re.escape(target)
