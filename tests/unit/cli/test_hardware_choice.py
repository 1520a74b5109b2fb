"""The device, mode and workers that `tandem up` chooses by default."""

import pytest

from tandem.cli.start.up import choose_hardware
from tandem.cli.start.worker_options import EngineOptions, RoleOptions


@pytest.mark.parametrize(
    ("roles", "device", "gpus", "joined", "expected"),
    [
        (RoleOptions(), "auto", 0, False, ("cpu", "disaggregated", None)),
        (RoleOptions(), "auto", 1, False, ("cuda", "adaptive", 1)),
        (RoleOptions(), "auto", 4, False, ("cuda", "adaptive", 4)),
        (RoleOptions(), "cuda:2", 4, False, ("cuda:2", "adaptive", None)),
        (RoleOptions(), "cpu", 4, False, ("cpu", "disaggregated", None)),
        (RoleOptions(), "auto", 4, True, ("cuda", "disaggregated", None)),
        (RoleOptions(workers=2), "auto", 0, False, ("cpu", "adaptive", 2)),
        (RoleOptions(workers=2), "auto", 4, False, ("cuda", "adaptive", 2)),
        (RoleOptions(prefill=1), "auto", 4, False, ("cuda", "disaggregated", 4)),
        (RoleOptions(mode="colocated"), "auto", 1, False, ("cuda", "colocated", 1)),
        (RoleOptions(mode="disaggregated", prefill=2), "cuda", 4, False, ("cuda", "disaggregated", 4)),
    ],
)
def test_what_is_chosen(  # noqa: PLR0917
    monkeypatch: pytest.MonkeyPatch,
    roles: RoleOptions,
    device: str,
    gpus: int,
    joined: bool,
    expected: tuple[str, str, int | None],
) -> None:
    monkeypatch.setattr("tandem.engine.device.usable_gpus", lambda: gpus)
    chosen, engine = choose_hardware(roles, EngineOptions(device=device), joined=joined)
    assert (engine.device, chosen.mode, chosen.workers) == expected


def test_workers_of_both_kinds_are_refused() -> None:
    with pytest.raises(Exception, match="--workers: is for workers that do both"):
        RoleOptions(prefill=1, workers=2).check()
