"""Reads an adapter folder in the format of peft: adapter_config.json and adapter_model.safetensors.

`tandem/engine/adapters/reader.py` runs it in a separate process that should start fast, so this module does not import
torch.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.engine.weights.safetensors_file import TensorEntry, read_header
from tandem.protocol.errors import ModelError, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<matrix>[AB])\.weight")
_UNSUPPORTED: dict[str, tuple[str, tuple[object, ...]]] = {
    "use_dora": ("DoRA, whose magnitudes are no update of low rank", (False, None)),
    "use_qalora": ("QALoRA", (False, None)),
    "bias": ("biases of its own", ("none", None)),
    "lora_bias": ("biases of its own", (False, None)),
    "fan_in_fan_out": ("transposed weights", (False, None)),
    "modules_to_save": ("whole modules (modules_to_save)", (None, [])),
    "trainable_token_indices": ("embeddings of tokens", (None, [], {})),
    "layer_replication": ("replicated layers", (None, [])),
    "alora_invocation_tokens": ("tokens that switch it on (aLoRA)", (None, [])),
}
"""Config fields with unsupported values: for each, the feature that these values enable, and the supported values."""
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq")
"""Prefixes of the values of `init_lora_weights` with which the base model's weights change, too.

An adapter folder does not have these changes, so its adapter is rejected.
"""
_HEADER_BYTES = 1 << 20
"""Maximum size in bytes of a tensor file's header, and of a config.

A header has about 150 bytes per tensor, and an adapter has two tensors per module.
"""
_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True, slots=True)
class LowRank:
    """The LoRA update of one module's weight [N, K]: scale · B · A, with A [rank, K] and B [N, rank]."""

    a: TensorEntry
    b: TensorEntry
    scale: float

    @property
    def rank(self) -> int:
        """The rank of the update."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """The description of an adapter on disk: its hash, and the locations of its matrices in the tensor file."""

    path: Path
    identity: str
    """The hash of the adapter's config and tensor file, in hex."""
    updates: Mapping[str, LowRank]
    """The LoRA update of each module, by the module's name in the base model's checkpoint."""

    @property
    def rank(self) -> int:
        """The highest rank of any update."""
        return max(update.rank for update in self.updates.values())


def read_updates(path: Path) -> Mapping[str, LowRank]:
    """Return the LoRA update of each module, by module name, from the config and the header of the tensor file.

    Raises ModelError if a file is missing or malformed, or if the adapter has anything but LoRA matrices of linear
    layers. A config with expensive regular expressions may take arbitrarily long.
    """
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise ModelError(f"{path} is no adapter: it has no {name}; save it with peft in the safetensors format.")
    config = _read_config(path / CONFIG)
    modules: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in read_header(path / WEIGHTS, _HEADER_BYTES).items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(
                f"{path / WEIGHTS} has the tensor {shown(name)}; only lora_A and lora_B of linear layers are served."
            )
        if entry.dtype not in _FLOATS:
            raise ModelError(f"{path / WEIGHTS}: {name} is stored as {entry.dtype}, not in 16, 32 or 64 bits.")
        modules.setdefault(match["module"], {})[match["matrix"]] = entry
    if not modules:
        raise ModelError(f"{path / WEIGHTS} has no tensors.")
    scales = _Scales(config)
    return {module: _update(path, module, pair, scales) for module, pair in modules.items()}


def _read_config(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as stream:
            text = stream.read(_HEADER_BYTES + 1)
        if len(text) > _HEADER_BYTES:
            raise ValueError(f"it has more than {_HEADER_BYTES} bytes")
        config = json.loads(text)
        if not isinstance(config, dict):
            raise TypeError("it is no JSON object")
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{file} cannot be read ({error}); save the adapter again.") from error
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{file}: peft_type is {shown(config.get('peft_type'))}; only LORA is served.")
    for field, (meaning, served) in _UNSUPPORTED.items():
        if config.get(field) not in served:
            raise ModelError(f"{file}: {field} is {shown(config[field])}: {meaning}, which is not served.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_BASE):
        raise ModelError(
            f"{file}: init_lora_weights is {shown(start)}, which changes the base model as well; save the adapter with"
            " path_initial_model_for_weight_conversion, which makes it a plain one."
        )
    for field in ("alpha_pattern", "rank_pattern"):
        if not isinstance(config.get(field) or {}, dict):
            raise ModelError(f"{file}: {field} is no JSON object.")
    return config


class _Scales:
    """The alpha and the rank that a config assigns to each module, from which its scale is computed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._alpha, self._rank = config.get("lora_alpha"), config.get("r")
        self._alphas = _compiled(config.get("alpha_pattern") or {})
        self._ranks = _compiled(config.get("rank_pattern") or {})
        self._by_root = bool(config.get("use_rslora"))

    def alpha(self, module: str) -> Any:
        return _first(module, self._alphas, self._alpha)

    def rank(self, module: str) -> Any:
        return _first(module, self._ranks, self._rank)

    def scale(self, alpha: float, rank: int) -> float:
        return alpha / (math.sqrt(rank) if self._by_root else rank)


_Patterns = Iterable[tuple[re.Pattern[str], object]]


def _update(path: Path, module: str, pair: Mapping[str, TensorEntry], scales: _Scales) -> LowRank:
    if len(pair) < 2:
        raise ModelError(f"{path / WEIGHTS} has only one of lora_A and lora_B for {module}.")
    a, b = pair["A"], pair["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or not 0 < a.shape[0] == b.shape[1]:
        raise ModelError(
            f"{path / WEIGHTS}: lora_A {list(a.shape)} and lora_B {list(b.shape)} of {module} are not [rank, inputs]"
            " and [outputs, rank]."
        )
    alpha, rank = scales.alpha(module), scales.rank(module)
    if not _is_finite(alpha):
        raise ModelError(f"{path / CONFIG}: the lora_alpha of {module} is {shown(alpha)}, not a finite number.")
    if rank != a.shape[0]:
        raise ModelError(f"{path / CONFIG} gives {module} rank {shown(rank)}, {WEIGHTS} has {a.shape[0]}.")
    return LowRank(a, b, scales.scale(alpha, a.shape[0]))


def _is_finite(number: object) -> bool:
    try:
        return isinstance(number, int | float) and math.isfinite(number)
    except OverflowError:
        return False


def _compiled(patterns: Mapping[str, object]) -> _Patterns:
    compiled = []
    for pattern, value in patterns.items():
        try:
            compiled.append((re.compile(rf"(?:.*\.)?(?:{pattern})"), value))
        except re.error as error:
            raise ModelError(f"{CONFIG}: the pattern {shown(pattern)} is no regular expression ({error}).") from error
    return compiled


def _first(module: str, patterns: _Patterns, default: object) -> Any:
    """Return the value of the first pattern that matches the end of the module's name, as peft does, else `default`."""
    return next((value for pattern, value in patterns if pattern.fullmatch(module)), default)
