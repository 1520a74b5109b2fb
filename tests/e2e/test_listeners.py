"""The listeners of a cluster on one host."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import psutil


def test_every_process_of_a_cluster_listens_on_loopback_alone(running_cluster: Callable[..., Any]) -> None:
    running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    addresses = set()
    process = psutil.Process(os.getpid())
    for member in (process, *process.children(recursive=True)):
        try:
            addresses |= {
                connection.laddr.ip
                for connection in member.net_connections(kind="inet")
                if connection.status == psutil.CONN_LISTEN
            }
        except psutil.NoSuchProcess:
            continue
    assert addresses
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}
