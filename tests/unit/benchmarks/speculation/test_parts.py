"""The parts of a step by the names of its kernels, and the time in which the device waits."""

import pytest

from benchmarks.engine.device_spans import Span
from benchmarks.speculation.parts import WAITING, part_of, parts_of, table_of


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("persistent_attention_kernel", "attention"),
        ("plan_tile_ranges_kernel", "attention"),
        ("skinny_kernel", "products"),
        ("nvjet_hsh_128x64_64x4_v_bz_TNT", "products"),
        ("choice_kernel", "sampling"),
        ("_rms_norm", "other"),
        ("Memcpy DtoH (Device -> Pinned)", "other"),
    ],
)
def test_the_part_of_a_kernel(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


def test_parts_are_a_step_s_share_of_the_time() -> None:
    """Two steps: overlapping kernels count once, and the gap between the steps is waiting."""
    spans = [
        Span(0, 40, "skinny_kernel"),
        Span(30, 50, "split_attention_kernel"),
        Span(50, 52, "Memcpy DtoH"),
        Span(72, 112, "skinny_kernel"),
        Span(112, 122, "split_attention_kernel"),
        Span(122, 124, "Memcpy DtoH"),
    ]
    parts = parts_of(spans, 2)
    assert parts == {"attention": 10.0, "sampling": 0.0, "products": 40.0, "other": 2.0, WAITING: 10.0}
    shown = table_of(1, 3, {"step": 60.0, **parts}, {"step": 120.0, **parts})
    assert shown.row_count == 6
