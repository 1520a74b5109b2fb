"""Numbers of controllers: each is given out once, and later ones are greater."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from tandem.cluster.ray_processes.controllers import next_number


class Table:
    """The part of Ray's key-value store that is needed; `rivals` take numbers between a read and a claim."""

    def __init__(self, rivals: int = 0) -> None:
        self.kept: set[tuple[str, str]] = set()
        self._rivals = rivals

    def list(self, prefix: str, *, namespace: str) -> list[bytes]:
        return [key.encode() for space, key in self.kept if space == namespace and key.startswith(prefix)]

    def put(self, key: str, value: str, overwrite: bool, *, namespace: str) -> bool:
        assert value
        assert not overwrite
        if self._rivals:
            self._rivals -= 1
            self.kept.add((namespace, key))
        there = (namespace, key) in self.kept
        self.kept.add((namespace, key))
        return there


def reach(table: Table, monkeypatch: pytest.MonkeyPatch, namespace: str) -> None:
    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_list", table.list)
    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_put", table.put)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(namespace=namespace))


def test_numbers_rise_and_never_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are not reused, whether or not their controllers still live."""
    table = Table()
    reach(table, monkeypatch, "tandem-a")
    assert [next_number() for _ in range(12)] == list(range(1, 13))
    reach(table, monkeypatch, "tandem-b")
    assert next_number() == 1


def test_a_number_that_another_was_faster_to_take_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    reach(Table(rivals=2), monkeypatch, "tandem-a")
    assert next_number() == 3


def test_a_number_may_have_to_be_above_what_somebody_has_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """All later numbers are above it as well, for every caller."""
    reach(Table(), monkeypatch, "tandem-a")
    assert [next_number(), next_number(40), next_number(7), next_number()] == [1, 41, 42, 43]
