"""Reading of an adapter's folder as peft writes it: adapter_config.json and adapter_model.safetensors."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.weights.safetensors_file import TensorEntry, read_header
from engine.weights.tensor_reader import FLOATS
from wire.errors import ModelError

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
"""Fields of the config that only some values are served of: what others mean, and those values."""
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq")
"""Initializations that also change the base model's weights, which the adapter's folder does not have."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LowRank:
    """An update of one module's weight [N, K]: scale · B · A, with A [rank, K] and B [N, rank]."""

    a: TensorEntry
    b: TensorEntry
    scale: float

    @property
    def rank(self) -> int:
        """The rank of the update."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter on disk."""

    path: Path
    identity: str
    """The hash of its two files, in hex."""
    updates: Mapping[str, LowRank]
    """The pairs of matrices, by the name of the module in the base model's checkpoint."""

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(update.rank for update in self.updates.values())


def read_adapter(path: Path) -> AdapterFolder:
    """Reads the config and the headers, and hashes both files.

    ModelError says what is missing, malformed, or more than updates of low rank.
    """
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise ModelError(f"{path} is no adapter: it has no {name}; save it with peft in the safetensors format.")
    config = _read_config(path / CONFIG)
    found: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in read_header(path / WEIGHTS).items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ModelError(
                f"{path / WEIGHTS} has the tensor {name}; only lora_A and lora_B of linear layers are served."
            )
        if entry.dtype not in FLOATS:
            raise ModelError(f"{path / WEIGHTS}: {name} is stored as {entry.dtype}, not in 16 or 32 bits.")
        found.setdefault(match["module"], {})[match["matrix"]] = entry
    if not found:
        raise ModelError(f"{path / WEIGHTS} has no tensors.")
    updates = {module: _update(path, module, pair, config) for module, pair in found.items()}
    return AdapterFolder(path, _hash(path), updates)


def check_unchanged(folder: AdapterFolder) -> None:
    """Raises ModelError if the files are not those that `read_adapter` hashed: tensors read meanwhile may be mixed."""
    if _hash(folder.path) != folder.identity:
        raise ModelError(f"{folder.path} changed while it was read; load it once it is written.")


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
        if not isinstance(config, dict):
            raise TypeError("it is no JSON object")
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{file} cannot be read ({error}); save the adapter again.") from error
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{file}: peft_type is {config.get('peft_type')!r}; only LORA is served.")
    for field, (meaning, served) in _UNSUPPORTED.items():
        if config.get(field) not in served:
            raise ModelError(f"{file}: {field} is {config[field]!r}: {meaning}, which is not served.")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_BASE):
        raise ModelError(
            f"{file}: init_lora_weights is {start!r}, which changes the base model as well; save the adapter with"
            " path_initial_model_for_weight_conversion, which makes it a plain one."
        )
    for field in ("alpha_pattern", "rank_pattern"):
        if not isinstance(config.get(field) or {}, dict):
            raise ModelError(f"{file}: {field} is no JSON object.")
    return config


def _update(path: Path, module: str, pair: Mapping[str, TensorEntry], config: Mapping[str, Any]) -> LowRank:
    if len(pair) < 2:
        raise ModelError(f"{path / WEIGHTS} has only one of lora_A and lora_B for {module}.")
    a, b = pair["A"], pair["B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or not 0 < a.shape[0] == b.shape[1]:
        raise ModelError(
            f"{path / WEIGHTS}: lora_A {list(a.shape)} and lora_B {list(b.shape)} of {module} are not [rank, inputs]"
            " and [outputs, rank]."
        )
    alpha = _of_module(module, config.get("alpha_pattern") or {}, config.get("lora_alpha"))
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"{path / CONFIG}: the lora_alpha of {module} is {alpha!r}, not a number.")
    rank = _of_module(module, config.get("rank_pattern") or {}, config.get("r"))
    if rank != a.shape[0]:
        raise ModelError(f"{path / CONFIG} gives {module} rank {rank!r}, {WEIGHTS} has {a.shape[0]}.")
    return LowRank(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _of_module(module: str, patterns: Mapping[str, object], default: object) -> Any:
    """Returns the value of the first pattern that the end of the module's name matches, as in peft."""
    for pattern, value in patterns.items():
        try:
            if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module):
                return value
        except re.error as error:
            raise ModelError(f"{CONFIG}: the pattern {pattern!r} is no regular expression ({error}).") from error
    return default


def _hash(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    try:
        for name in (CONFIG, WEIGHTS):
            with (path / name).open("rb") as stream:
                while piece := stream.read(_READ_BYTES):
                    digest.update(piece)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); is this process allowed to read it?") from error
    return digest.hexdigest()
