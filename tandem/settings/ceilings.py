"""The highest rates of a worker's device."""

import math
from dataclasses import dataclass

from tandem.settings.invalid import refuse


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The highest rates of a device."""

    flops: float
    """Floating-point operations a second, in the model's dtype."""
    bytes_per_s: float
    """Bytes a second between its memory and its cores."""
    launch_s: float
    """Seconds of a step that are neither arithmetic nor memory reads."""
    verify_s: float = 0.0
    """Further seconds of a step that verifies drafts: the host plans it while the device waits."""


def parse_ceilings(option: str, text: str) -> Ceilings:
    """TFLOPS:GBPS, 10¹² operations and 10⁹ bytes a second; InvalidArgument names `option`."""
    try:
        tera, giga = (float(part) for part in text.split(":"))
    except ValueError:
        tera = giga = math.nan
    if not (0 < tera < math.inf and 0 < giga < math.inf):
        example = "990:4800 are an H200's in bfloat16"
        refuse(option, f"{text!r} must be TFLOPS:GBPS, both above 0; {example}")
    return Ceilings(tera * 1e12, giga * 1e9, launch_s=0.0)
