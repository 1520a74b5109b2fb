"""The energy that GPUs use, by the counter in NVIDIA's management library (NVML), which GPUs since Volta have."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any

import torch

log = logging.getLogger(__name__)

_LIBRARY = "libnvidia-ml.so.1"
_SUCCESS = 0
_MILLI = 1e-3


class EnergyCounter:
    """Reads the energy that some GPUs have used since the counter was made. Any thread may use it."""

    def __init__(self, library: Any, uuids: Sequence[str]) -> None:
        """Find the GPUs with these UUIDs in `library`, which is NVML. Raises OSError if one has no counter."""
        self._library = library
        self._handles = [ctypes.c_void_p() for _ in uuids]
        self._call("nvmlInit_v2")
        for uuid, handle in zip(uuids, self._handles, strict=True):
            self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(handle))
        self._start = self._read()

    def joules(self) -> float:
        """Return the energy of all these GPUs in joules, idle time included. Raises OSError if one cannot be read."""
        return (self._read() - self._start) * _MILLI

    def _read(self) -> int:
        energy, total = ctypes.c_ulonglong(), 0
        for handle in self._handles:
            self._call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(energy))
            total += energy.value
        return total

    def _call(self, function: str, *arguments: object) -> None:
        if (status := getattr(self._library, function)(*arguments)) != _SUCCESS:
            raise OSError(f"{function} of NVML returned the error {status}")


def open_energy_counter(device: torch.device, gpus: int) -> EnergyCounter | None:
    """Return a counter of `gpus` GPUs from `device` on; None on a CPU, and if one of the GPUs cannot be read."""
    if device.type != "cuda":
        return None
    first = device.index or 0
    try:
        uuids = [f"GPU-{torch.cuda.get_device_properties(first + number).uuid}" for number in range(gpus)]
        return EnergyCounter(ctypes.CDLL(_LIBRARY), uuids)
    except (OSError, AttributeError) as error:
        log.info("the energy of the GPUs is not measured: %s", error)
        return None
