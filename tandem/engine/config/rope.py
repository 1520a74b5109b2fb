"""The settings of rotary position embedding (RoPE), as config.json describes them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.protocol.errors import ModelError

Json = Mapping[str, Any]
_SUPPORTED = ("default", "linear", "llama3", "longrope", "proportional", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The settings of RoPE; `kind` determines which of the other fields are used. Contexts are in tokens."""

    theta: float = 10000.0
    kind: str = "default"
    """The type of context scaling: `default` (none), `linear`, `llama3`, `longrope`, `proportional` or `yarn`."""
    factor: float = 1.0
    original_context: int = 0
    """The context length before scaling (llama3, longrope, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """The factor by which cos and sin are multiplied (longrope, yarn)."""
    truncate: bool = True
    """True if the limits of YaRN's correction range are rounded to whole dimensions."""
    short_factors: tuple[float, ...] = ()
    """The divisor of each frequency if the engine's context is at most `original_context` (longrope)."""
    long_factors: tuple[float, ...] = ()
    """The divisor of each frequency if the engine's context is longer than `original_context` (longrope)."""
    fraction: float = 1.0
    """The fraction of the pairs of dimensions that is rotated, the highest frequencies first (proportional)."""


def parse_rope(config: Json, scaling: Json | None = None) -> RopeConfig:
    """Parse the RoPE settings of a config.

    They are in `rope_parameters`, which include theta (transformers 5), or in `rope_theta` and `rope_scaling`
    (transformers 4). For a model with several RoPE tables, `scaling` has the settings of one table, which are used
    instead. Raises ModelError if the scaling is not supported or theta is not above 0.
    """
    settings = scaling
    if settings is None:
        settings = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind == "mrope":
        # Qwen2-VL rotates by three positions, which are equal in text.
        kind = "default"
    if kind not in _SUPPORTED:
        raise ModelError(f"RoPE scaling {kind!r} is not supported; supported are {', '.join(_SUPPORTED)}.")
    theta = float(settings.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if not 0 < theta < math.inf:
        raise ModelError(f"rope_theta {theta:g} is not supported; it must be above 0.")
    if kind == "default":
        return RopeConfig(theta=theta)
    # Phi-style files have the original context at the top level, where it takes precedence in transformers.
    original = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    original_context = int(original or config["max_position_embeddings"])
    stretched = int(config["max_position_embeddings"]) / original_context
    if kind == "proportional":
        fraction = rotary_fraction({"rope_parameters": settings})
        if not 0 < fraction <= 1:
            raise ModelError(f"partial_rotary_factor {fraction} is not supported; it must be above 0, and at most 1.")
        return RopeConfig(theta=theta, kind=kind, factor=float(settings.get("factor") or 1.0), fraction=fraction)
    factor = float(
        settings["factor"] if settings.get("factor") is not None or kind not in ("longrope", "yarn") else stretched
    )
    defaults = RopeConfig()
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_context=original_context,
        low_freq_factor=float(settings.get("low_freq_factor") or defaults.low_freq_factor),
        high_freq_factor=float(settings.get("high_freq_factor") or defaults.high_freq_factor),
        beta_fast=float(settings.get("beta_fast") or defaults.beta_fast),
        beta_slow=float(settings.get("beta_slow") or defaults.beta_slow),
        attention_factor=_attention_factor(settings, kind, factor, original_context),
        truncate=bool(settings.get("truncate", True)),
        short_factors=_factors(settings, "short_factor") if kind == "longrope" else (),
        long_factors=_factors(settings, "long_factor") if kind == "longrope" else (),
    )


def rotary_fraction(config: Json) -> float:
    """Return the fraction of each head's dimensions that is rotated; 1 if config.json does not have it."""
    settings = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    return float(settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)


def yarn_temperature(factor: float, scale: float) -> float:
    """Return YaRN's temperature for a context length extended by `factor` (Peng et al. 2023, section 3.4).

    `scale` is `mscale` or `mscale_all_dim` of config.json, by default 1.
    """
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _factors(settings: Json, name: str) -> tuple[float, ...]:
    factors = tuple(float(factor) for factor in settings[name])
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelError(f"{name} of longrope has a factor that is not a number above 0.")
    return factors


def _attention_factor(settings: Json, kind: str, factor: float, original_context: int) -> float:
    """Return the factor by which cos and sin are multiplied: that of LongRoPE, or YaRN's attention temperature."""
    if kind not in ("longrope", "yarn"):
        return 1.0
    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original_context)) if factor > 1 else 1.0
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return yarn_temperature(factor, float(settings["mscale"])) / yarn_temperature(
            factor, float(settings["mscale_all_dim"])
        )
    return yarn_temperature(factor, 1.0)
