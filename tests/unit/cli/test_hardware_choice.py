"""The device, mode and workers that `tandem up` chooses by default."""

from typing import Any

import pytest

from tandem.cli.start.setting_options import OPTIONS
from tandem.cli.start.up import check_workers, choose_hardware


@pytest.mark.parametrize(
    ("given", "device", "gpus", "joined", "expected"),
    [
        ({}, "auto", 0, False, ("cpu", "disaggregated", None)),
        ({}, "auto", 1, False, ("cuda", "adaptive", 1)),
        ({}, "auto", 4, False, ("cuda", "adaptive", 4)),
        ({}, "cuda:2", 4, False, ("cuda:2", "adaptive", None)),
        ({}, "cpu", 4, False, ("cpu", "disaggregated", None)),
        ({}, "auto", 4, True, ("cuda", "disaggregated", None)),
        ({"workers": 2}, "auto", 0, False, ("cpu", "adaptive", 2)),
        ({"workers": 2}, "auto", 4, False, ("cuda", "adaptive", 2)),
        ({"prefill": 1}, "auto", 4, False, ("cuda", "disaggregated", 4)),
        ({"tensor_parallel_size": 2}, "auto", 4, False, ("cuda", "adaptive", 2)),
        ({"tensor_parallel_size": 3}, "cpu", 0, False, ("cpu", "adaptive", None)),
        ({"prefill_tensor_parallel_size": 3}, "cpu", 0, False, ("cpu", "disaggregated", None)),
        ({"prefill_pipeline_size": 2}, "auto", 4, False, ("cuda", "disaggregated", 4)),
        ({"prefill_context_parallel_size": 2}, "auto", 4, False, ("cuda", "disaggregated", 4)),
        ({"mode": "colocated"}, "auto", 1, False, ("cuda", "colocated", 1)),
        ({"mode": "disaggregated", "prefill": 2}, "cuda", 4, False, ("cuda", "disaggregated", 4)),
    ],
)
def test_what_is_chosen(  # noqa: PLR0917
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, Any],
    device: str,
    gpus: int,
    joined: bool,
    expected: tuple[str, str, int | None],
) -> None:
    monkeypatch.setattr("tandem.engine.device.usable_gpus", lambda: gpus)
    defaults = {name: option.default for name, option in OPTIONS.items()}
    chosen = choose_hardware({**defaults, **given, "device": device, "address": "h:1" if joined else ""})
    assert (chosen["device"], chosen["mode"], chosen["workers"]) == expected


def test_workers_of_both_kinds_are_refused() -> None:
    with pytest.raises(Exception, match="--workers: is for workers that do both"):
        check_workers("auto", prefill=1, decode=None, workers=2)
