"""The dtypes of latent kernels: Triton's interpreter cuts bfloat16 where a GPU rounds, so float16 stands for it."""

import pytest
import torch

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.fixture(params=[torch.float32, torch.float16], ids=["float32", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request: pytest.FixtureRequest) -> torch.dtype:
    """The dtype of 8-bit codes."""
    chosen: torch.dtype = request.param
    return chosen
