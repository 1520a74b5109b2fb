"""Quotas: two token buckets of a tenant."""

from pathlib import Path

import pytest

from router.access.callers import ANYONE, Callers
from router.access.quota import QUOTA_HEADERS, Quota
from tandem.capacity.simulation.clock import VirtualClock
from tandem.net.security.api_keys import KeySource
from tandem.protocol.errors import PermissionDenied, RateLimited, TandemError, Unauthenticated
from tests.unit.net.test_api_keys import shown


def refused(quota: Quota) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        quota.admit()
    return caught.value


def test_requests_come_back_one_by_one() -> None:
    clock = VirtualClock()
    quota = Quota(6, 0, clock)
    for _ in range(6):
        quota.admit()
    assert refused(quota).retry_after_s == pytest.approx(10.0)
    clock.now += 9.0
    assert refused(quota).retry_after_s == pytest.approx(1.0)
    clock.now += 1.01
    quota.admit()
    assert "6 requests a minute" in refused(quota).message
    clock.now += 3600.0
    for _ in range(6):
        quota.admit()
    refused(quota)


def test_a_debt_of_tokens_is_paid_before_the_next_request() -> None:
    clock = VirtualClock()
    quota = Quota(0, 600, clock)
    quota.admit()
    quota.spend(1200)
    assert refused(quota).retry_after_s == pytest.approx(60.1), "600 of debt and one token, at ten a second"
    clock.now += 60.2
    quota.admit()


def test_the_headers_say_what_is_left() -> None:
    clock = VirtualClock()
    quota = Quota(60, 6000, clock)
    quota.admit()
    quota.spend(9000)
    headers = quota.headers()
    assert set(headers) == set(QUOTA_HEADERS)
    assert [headers[name] for name in QUOTA_HEADERS] == ["60", "59", "1s", "6000", "0", "1m30s"]
    assert Quota(0, 5, clock).headers()["x-ratelimit-remaining-tokens"] == "5"
    assert "x-ratelimit-limit-requests" not in Quota(0, 5, clock).headers()


def test_a_refused_request_takes_nothing() -> None:
    clock = VirtualClock()
    quota = Quota(10, 10, clock)
    quota.spend(20)
    refused(quota)
    assert quota.headers()["x-ratelimit-remaining-requests"] == "10"


def test_keys_of_one_name_share_a_quota_that_a_new_limit_replaces(tmp_path_factory: pytest.TempPathFactory) -> None:
    file, clock = tmp_path_factory.mktemp("keys") / "keys", VirtualClock()
    file.write_text(
        "old name=acme requests_per_minute=2\nnew name=acme requests_per_minute=2\nother requests_per_minute=2"
    )
    counted: list[TandemError] = []
    callers = Callers(KeySource(file=file), lambda _, error: counted.append(error), clock)
    old, new, other = (callers.tenant(shown(key)) for key in ("old", "new", "other"))
    assert old.tenant == new.tenant != other.tenant
    assert (old.name, other.name.startswith("key-"), "other" in other.name) == ("acme", True, False)
    callers.admit(old)
    callers.admit(new)
    with pytest.raises(RateLimited):
        callers.admit(callers.tenant(shown("old")))
    callers.admit(other)
    assert len(counted) == 1
    file.write_text("old name=acme requests_per_minute=3")
    clock.now += 1.0
    callers.admit(callers.tenant(shown("old")))


def test_an_operators_key_is_needed_where_keys_are(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("tenant\nops name=ops role=operator\nreads role=reader")
    callers = Callers(KeySource(file=tmp_path / "keys", readers=frozenset({"metrics"})), lambda _, error: None)
    assert callers.operator(shown("ops")).name == "ops"
    for key in ("tenant", "reads", "metrics"):
        with pytest.raises(PermissionDenied, match="this needs a key of the role operator"):
            callers.operator(shown(key))
    with pytest.raises(Unauthenticated):
        callers.operator(shown("unknown"))
    assert Callers(KeySource(), lambda _, error: None).operator([]) == ANYONE, "without keys nobody is refused"
