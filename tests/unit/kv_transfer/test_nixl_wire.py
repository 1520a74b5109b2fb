import pytest

from kv_transfer.nixl_backend.ucx_log import find_transport


def table(agent: str, operation: str, *rows: str) -> str:
    lines = [f"| {agent} intra-node cfg#1      |", f"| {operation} |", "|  Range  | Description | Config |", *rows]
    return "\n".join(f"[1795243595.005951] [vm:8579 :0]   {line}" for line in lines) + "\n"


PUT = "remote memory write by ucp_put*(multi) from host memory to host"
GET = "remote memory read by ucp_get*(multi) into host memory from host"
CMA = table("prefill-0/1", PUT, "| 0..inf | zero-copy   | cma/memory |")


def test_the_wire_of_my_writes_is_named() -> None:
    assert find_transport(CMA, "prefill-0/1", 1 << 20) == "cma"


@pytest.mark.parametrize(
    "other",
    [
        table("prefill-0/1", PUT.replace("(multi)", ""), "| 0..inf | zero-copy | tcp/lo |"),
        table("prefill-0/1", "active message by ucp_am_send*(multi) from host memory", "| 0..inf | short | tcp/lo |"),
        table("prefill-0/11", PUT, "| 0..inf | zero-copy | sysv/memory |"),
        "",
        "UCX  WARN something else entirely | 0..inf | x | tcp/lo |\n",
    ],
)
def test_tables_of_others_and_of_other_operations_say_nothing(other: str) -> None:
    assert find_transport(other, "prefill-0/1", 1 << 20) is None
    assert find_transport(CMA + other, "prefill-0/1", 1 << 20) == "cma"


def test_the_row_for_my_page_size_counts() -> None:
    rows = ("| 0 | short | posix/memory |", "| 1..16K | copy-in | tcp/lo |", "| 16385..inf | zero-copy | cma/memory |")
    log = table("a/1", PUT, *rows)
    assert [find_transport(log, "a/1", size) for size in (0, 1, 16384, 16385)] == ["posix", "tcp", "tcp", "cma"]


def test_several_rails_are_all_named_once() -> None:
    config = "50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_1:1/path0"
    assert find_transport(table("a/1", PUT, f"| 0..inf | zero-copy | {config} |"), "a/1", 1) == "rc_mlx5"


def test_the_newest_table_wins() -> None:
    newer = table("prefill-0/1", PUT, "| 0..inf | zero-copy | tcp/eth0 |")
    assert find_transport(CMA + newer, "prefill-0/1", 1) == "tcp"


def test_reads_have_tables_of_their_own() -> None:
    log = CMA + table("prefill-0/1", GET, "| 0..inf | software emulation | tcp/lo |")
    assert find_transport(log, "prefill-0/1", 1) == "cma"
