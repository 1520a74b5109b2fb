"""A worker uses the GPU that Ray assigned to it, even if Ray does not hide the others."""

import pytest

from tandem.worker.actor import given_device, visible_number


@pytest.mark.parametrize(
    ("gpu", "visible", "number"),
    [("3", None, 3), ("3", "3", 0), ("6", "4,6", 1), ("GPU-b", "GPU-a, GPU-b", 1)],
)
def test_the_given_gpu_is_found_among_the_visible(gpu: str, visible: str | None, number: int) -> None:
    assert visible_number(gpu, visible) == number


@pytest.mark.parametrize("device", ["cpu", "cuda:2"])
def test_what_is_named_already_stays(device: str) -> None:
    assert given_device(device) == device
