"""The division of a worker's settings between its two halves."""

from pathlib import Path

from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from tandem.engine.config import EngineConfig
from tandem.protocol.messages import Role
from tandem.worker.config import WorkerConfig


def test_each_half_has_its_part() -> None:
    config = WorkerConfig(
        "w",
        Role.BOTH,
        EngineConfig(Path("m")),
        lease_s=1.0,
        quarantine_s=2.0,
        quarantine_far_s=3.0,
        write_window_s=4.0,
        transfer_deadline_s=6.0,
        quarantine_share_max=0.7,
        max_prefill_requests=8,
    )
    assert config.prefill == PrefillConfig(max_requests=8, quarantine_share_max=0.7)
    assert config.decode == DecodeConfig(
        lease_s=1.0,
        quarantine_s=2.0,
        quarantine_far_s=3.0,
        write_window_s=4.0,
        check_deadline_s=6.0,
        quarantine_share_max=0.7,
    )
