"""The dtypes of latent kernels: Triton's interpreter cuts bfloat16 where a GPU rounds, so float16 stands for it."""

import pytest
import torch


@pytest.fixture(params=[torch.float32, torch.float16], ids=["float32", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen
