"""The peak compute and memory rates of a worker's device, from which the cost model derives step times."""

import math
from dataclasses import dataclass

from tandem.settings.invalid import refuse


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The peak rates and fixed costs of a device, as a roofline model needs them."""

    flops: float
    """Peak floating-point operations per second in the model's dtype."""
    bytes_per_s: float
    """Peak bytes per second between the device's memory and its cores."""
    launch_s: float
    """Fixed seconds of each step, for launches and everything else that is neither arithmetic nor memory reads."""
    verify_s: float = 0.0
    """Additional fixed seconds of a step that verifies draft tokens: the host plans it while the device waits."""


def parse_ceilings(option: str, text: str) -> Ceilings:
    """Parse "TFLOPS:GBPS", in units of 10¹² operations and 10⁹ bytes per second.

    Raises InvalidArgument, which names `option`, unless `text` consists of two positive numbers.
    """
    try:
        tera, giga = (float(part) for part in text.split(":"))
    except ValueError:
        tera = giga = math.nan
    if not (0 < tera < math.inf and 0 < giga < math.inf):
        example = "990:4800 are an H200's in bfloat16"
        refuse(option, f"{text!r} must be TFLOPS:GBPS, both above 0; {example}")
    return Ceilings(tera * 1e12, giga * 1e9, launch_s=0.0)
