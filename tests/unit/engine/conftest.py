"""One thread for everything, because tests share their cores, and engines that are loaded quickly."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(no_warm_up: None) -> None:
    torch.set_num_threads(1)
