"""The peak compute and memory rates of a worker's device, from which the cost model derives step times."""

import math
from dataclasses import dataclass, replace

from tandem.settings.invalid import refuse

NVLINK_BYTES_PER_S = 4.5e11
"""Bytes per second, in one direction, between two H200 of a host."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The peak rates and fixed costs of a device, the parameters of a roofline model."""

    flops: float
    """Peak floating-point operations per second in the model's dtype."""
    bytes_per_s: float
    """Peak bytes per second between the device's memory and its cores."""
    launch_s: float
    """Fixed seconds of each step: kernel launches and all other work except arithmetic and memory reads."""
    verify_s: float = 0.0
    """Additional fixed seconds of a step that verifies draft tokens: the device waits while the host plans the step."""
    link_bytes_per_s: float = NVLINK_BYTES_PER_S
    """Peak bytes per second, in one direction, between the device and another one of its host."""

    def shared(self, processes: int) -> "Ceilings":
        """Return the rates of one of `processes` processes that share the device equally."""
        return replace(self, flops=self.flops / processes, bytes_per_s=self.bytes_per_s / processes)


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
