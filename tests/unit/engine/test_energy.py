"""The energy counter of GPUs, against a library that returns what the test sets."""

import ctypes
from typing import Any

import pytest
import torch

from tandem.engine.energy import EnergyCounter, open_energy_counter
from tandem.metrics import families as f
from tandem.worker.reporting.metrics import energy_facts


class Library:
    """Has the functions of NVML that are called; GPUs without an entry in `millijoules` are unknown."""

    def __init__(self, **millijoules: int) -> None:
        self.millijoules = millijoules
        self.names = [f"GPU-{name}" for name in millijoules]

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if uuid.decode() not in self.names:
            return 6
        handle._obj.value = 1 + self.names.index(uuid.decode())
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: ctypes.c_void_p, energy: Any) -> int:
        assert handle.value is not None
        value = list(self.millijoules.values())[handle.value - 1]
        energy._obj.value = max(0, value)
        return 3 if value < 0 else 0


def test_joules_are_those_of_all_gpus_since_the_start() -> None:
    library = Library(a=5_000_000_000_000, b=70_000, c=1)
    counter = EnergyCounter(library, ["GPU-b", "GPU-a"])
    assert energy_facts(counter) == {f.STEP_ENERGY: 0.0}
    library.millijoules.update(a=5_000_000_012_000, b=70_500, c=9)
    assert energy_facts(counter) == {f.STEP_ENERGY: pytest.approx(12.5)}


def test_a_gpu_without_a_counter_has_no_metric() -> None:
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByUUID of NVML returned the error 6"):
        EnergyCounter(Library(a=1), ["GPU-b"])
    library = Library(a=1)
    counter = EnergyCounter(library, ["GPU-a"])
    library.millijoules["a"] = -1
    assert energy_facts(counter) == {}
    assert energy_facts(None) == {}
    assert open_energy_counter(torch.device("cpu"), 2) is None
