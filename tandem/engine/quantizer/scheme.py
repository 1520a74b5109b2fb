"""The schemes to which a checkpoint can be quantized, and how compressed-tensors names them."""

from dataclasses import dataclass
from typing import Any

from tandem.engine.quantizer.sparsity import SPARSITY
from tandem.protocol.errors import InvalidArgument

GROUPS = (128, 64, 32)
"""The group sizes in order of preference; by default the first that divides all linear layers' inputs is used."""


@dataclass(frozen=True, slots=True)
class OutputScheme:
    """The format in which the quantized weights of linear layers are written."""

    name: str
    bits: int
    layout: str
    """The value of `format` in compressed-tensors."""
    kind: str = "int"
    """The type of the codes: `int`, or `float` (E4M3); for 16 bits the weights themselves."""
    symmetric: bool = True
    """False if each scale has a zero point."""
    grouped: bool = False
    """True if each group of inputs has a scale, False if each output has one."""
    activations: bool = False
    """True if the server quantizes activations to the type of the weights, with one scale for each token."""

    @property
    def quantizes(self) -> bool:
        """False if weights keep their dtype, and only become sparse."""
        return self.bits < 16

    @property
    def largest(self) -> float:
        """The largest value of a code."""
        return 448.0 if self.kind == "float" else 2 ** (self.bits - 1) - 1

    @property
    def lowest(self) -> float:
        """The lowest value of a code."""
        return -self.largest if self.kind == "float" else -self.largest - 1

    @property
    def reach(self) -> float:
        """The magnitude, in codes, to which a symmetric scheme maps a group's largest weight.

        It is half of the range of codes, as in compressed-tensors, so each weight, of either sign, is within half a
        step of a code.
        """
        return (self.largest - self.lowest) / 2

    @property
    def packed(self) -> bool:
        """True if a 32-bit word has several codes."""
        return self.layout == "pack-quantized"

    def config(self, group: int | None, ignore: list[str], *, sparse: bool = False) -> dict[str, Any]:
        """Return the `quantization_config` of config.json; `ignore` lists the linear modules that are not quantized.

        The zeros of a sparse weight are stored like other codes, so that every loader of the format reads them.
        """
        weights = self._arguments("group" if self.grouped else "channel", dynamic=False) | {"group_size": group}
        inputs = self._arguments("token", dynamic=True) if self.activations else None
        groups = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": groups},
            "ignore": ignore,
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
            **({"sparsity_config": {"format": "dense", "sparsity_structure": SPARSITY}} if sparse else {}),
        }

    def _arguments(self, strategy: str, *, dynamic: bool) -> dict[str, Any]:
        return {
            "num_bits": self.bits,
            "type": self.kind,
            "symmetric": self.symmetric,
            "strategy": strategy,
            "group_size": None,
            "dynamic": dynamic,
        }


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        OutputScheme("w4a16", 4, "pack-quantized", grouped=True),
        OutputScheme("w4a16-asym", 4, "pack-quantized", symmetric=False, grouped=True),
        OutputScheme("w8a16", 8, "pack-quantized"),
        OutputScheme("w8a8", 8, "int-quantized", activations=True),
        OutputScheme("fp8", 8, "float-quantized", kind="float", activations=True),
        OutputScheme("none", 16, "dense", kind="float"),
    )
}


def parse_scheme(name: str) -> OutputScheme:
    """Return the scheme of this name. Raises InvalidArgument if it is unknown."""
    if name not in SCHEMES:
        raise InvalidArgument("scheme", f"{name!r} is not known; use {', '.join(SCHEMES)}.")
    return SCHEMES[name]


def choose_group(scheme: OutputScheme, asked: int | None, inputs: set[int]) -> int | None:
    """Return the group size for linear layers with these numbers of inputs; None for a scheme without groups.

    The group size is `asked` or, if that is None, the first of `GROUPS` that divides all numbers of inputs. Raises
    InvalidArgument if there is none, if `asked` does not divide all of them or is no multiple of 8, or if `asked` is
    set for a scheme without groups.
    """
    if not scheme.grouped:
        if asked is not None:
            raise InvalidArgument("group_size", f"{scheme.name} has one scale for each output; leave the option out.")
        return None
    for group in GROUPS if asked is None else (asked,):
        if group % 8 == 0 and not any(width % group for width in inputs):
            return group
    sizes = ", ".join(map(str, sorted(inputs)))
    raise InvalidArgument(
        "group_size",
        f"the model's products have {sizes} inputs, which groups of {asked or ' or '.join(map(str, GROUPS))} do not"
        " divide; choose a divisor that is a multiple of 8, or a scheme with 8 bits.",
    )
