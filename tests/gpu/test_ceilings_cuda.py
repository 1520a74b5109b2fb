"""Measuring the ceilings of a GPU: no memory stays allocated, and a full device is no error."""

import pytest
import torch

from tandem.cost_model.roofline import GPU
from tandem.engine.ceilings import measure_ceilings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DEVICE = torch.device("cuda:0")
SPARE_BYTES = 200 << 20


def test_nothing_stays_on_the_device() -> None:
    measure_ceilings(DEVICE, torch.bfloat16)  # libraries keep their workspaces
    before = torch.cuda.memory_reserved(DEVICE)
    ceilings = measure_ceilings(DEVICE, torch.bfloat16)
    assert torch.cuda.memory_reserved(DEVICE) <= before
    assert ceilings != GPU
    assert ceilings.flops > 10 * measure_ceilings(torch.device("cpu"), torch.float32, threads=1).flops


def test_a_full_device_has_a_typical_ones() -> None:
    free, _ = torch.cuda.mem_get_info(DEVICE)
    held = torch.empty(free - SPARE_BYTES, dtype=torch.uint8, device=DEVICE)
    assert measure_ceilings(DEVICE, torch.bfloat16) == GPU
    del held
    torch.cuda.empty_cache()
