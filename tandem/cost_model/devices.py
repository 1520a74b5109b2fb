"""GPU models by name, with the rates in their data sheets."""

from dataclasses import dataclass

from tandem.cost_model.roofline import GPU
from tandem.protocol.errors import InvalidArgument
from tandem.settings.ceilings import NVLINK_BYTES_PER_S, Ceilings


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A GPU model: dense 16-bit `flops` and memory `bytes_per_s` by its data sheet, `memory_gib` by its driver.

    `link_bytes_per_s` is the rate in one direction to another GPU of the host: NVLink or, without it, PCIe.
    """

    flops: float
    bytes_per_s: float
    memory_gib: float
    link_bytes_per_s: float = NVLINK_BYTES_PER_S

    @property
    def ceilings(self) -> Ceilings:
        """The rates that steps actually reach: fractions of the data sheet's rates, as measured on an H200."""
        return Ceilings(
            GPU.flops / _MEASURED.flops * self.flops,
            GPU.bytes_per_s / _MEASURED.bytes_per_s * self.bytes_per_s,
            GPU.launch_s,
            GPU.verify_s,
            self.link_bytes_per_s,
        )


_MEASURED = DeviceKind(990e12, 4.8e12, 139.8)
DEVICES = {
    "GB200": DeviceKind(2500e12, 8.0e12, 185.0, 9e11),
    "B200": DeviceKind(2250e12, 8.0e12, 178.0, 9e11),
    "H200": _MEASURED,
    "H100": DeviceKind(990e12, 3.35e12, 79.6),
    "H100-NVL": DeviceKind(835e12, 3.9e12, 93.1, 3e11),
    "H800": DeviceKind(990e12, 3.35e12, 79.6, 2e11),
    "A100-80": DeviceKind(312e12, 2.04e12, 79.3, 3e11),
    "A100-40": DeviceKind(312e12, 1.56e12, 39.4, 3e11),
    "L40S": DeviceKind(362e12, 0.864e12, 44.5, 3.2e10),
    "L4": DeviceKind(121e12, 0.3e12, 22.5, 3.2e10),
}
"""The GPU models that workers run on, by name, from their data sheets; the SXM version if there is one."""
NOT_SERVED = {"MI300X": DeviceKind(1307e12, 5.3e12, 191.9, 4.48e11)}
"""GPU models that workers do not run on, which only the roofline of `tandem plan` compares with the others.

The link rate of the MI300X is that to all seven others of its host together.
"""


def device_kind(option: str, name: str) -> DeviceKind:
    """Return the GPU model of this name, which workers run on.

    Raises InvalidArgument, with `option` and the known names, if the name is unknown.
    """
    kind = DEVICES.get(name.upper())
    if kind is None:
        raise InvalidArgument(
            option, f"{name!r} is not one of {', '.join(DEVICES)}; or give --ceilings and --memory-gib"
        )
    return kind
