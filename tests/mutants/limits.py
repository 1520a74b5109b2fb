"""Mutants of keys, quotas, limits, deadlines and admission."""

from tests.mutants.mutant import Mutant

_ACCESS_TESTS = ("tests/unit/router/access", "tests/unit/net/test_api_keys.py")
_QUOTA_TESTS = ("tests/unit/router/access/test_quota.py",)
_ADMISSION_TESTS = ("tests/unit/router/placement/test_admission.py",)
_QUEUE_TESTS = ("tests/unit/router/placement/test_queue.py", "tests/unit/router/placement/test_classes_and_tenants.py")
_API_TESTS = ("tests/unit/router/api",)

MUTANTS = (
    Mutant(
        "a call without a valid key is refused",
        "router/access/callers.py",
        "        if key is None:\n            raise no_valid_key(kind)\n        check_role(key, *roles)\n",
        "        if key is None:\n            return ANYONE\n        check_role(key, *roles)\n",
        _ACCESS_TESTS,
    ),
    Mutant(
        "a key's role limits its calls",
        "router/access/callers.py",
        "        check_role(key, *roles)\n",
        "",
        _ACCESS_TESTS,
    ),
    Mutant(
        "an unknown key is refused",
        "tandem/net/security/api_keys.py",
        "        if self.find(headers) is None and self.required:\n",
        "        if False:\n",
        (*_ACCESS_TESTS, "tests/unit/net"),
    ),
    Mutant(
        "keys with different names are different tenants",
        "router/access/tenants.py",
        "blake2b(name.encode(), digest_size=16",
        'blake2b(b"", digest_size=16',
        (*_ACCESS_TESTS, "tests/unit/router/api/test_one_key_one_tenant.py"),
    ),
    Mutant(
        "a quota that is used up rejects requests",
        "router/access/quota.py",
        "            if bucket is not None and (wait_s := bucket.seconds_until(1.0)):\n",
        "            if bucket is not None and (wait_s := bucket.seconds_until(-1e9)):\n",
        _QUOTA_TESTS,
    ),
    Mutant(
        "tokens are charged to the quota",
        "router/access/quota.py",
        "            self._tokens.take(tokens)\n",
        "            pass\n",
        _QUOTA_TESTS,
    ),
    Mutant(
        "a rejection by the quota says when to come back",
        "router/access/quota.py",
        "                    retry_after_s=wait_s,\n",
        "",
        _QUOTA_TESTS,
    ),
    Mutant(
        "the number of concurrent calls is limited",
        "tandem/net/limits/call_count.py",
        "        if self.running >= self._limit:\n",
        "        if False:\n",
        ("tests/unit/net/test_call_guard.py",),
    ),
    Mutant(
        "a call that has ended is not counted",
        "tandem/net/limits/call_count.py",
        "        self.running -= 1\n",
        "        pass\n",
        ("tests/unit/net/test_call_guard.py",),
    ),
    Mutant(
        "a full queue rejects requests",
        "router/placement/scheduler.py",
        "        if len(self.queue) + more + held >= self._limit:\n",
        "        if False:\n",
        ("tests/unit/router/placement", "tests/unit/router/test_choices.py"),
    ),
    Mutant(
        "a tenant fills only its share of the queue",
        "router/placement/scheduler.py",
        "        if self.queue.count_of(request.tenant) + more + held_own >= self._tenant_limit:\n",
        "        if False:\n",
        ("tests/unit/router/placement", "tests/unit/router/test_choices.py"),
    ),
    Mutant(
        "a rejection by a full queue says when to come back",
        "router/placement/scheduler.py",
        "            raise Refused(Refusal.QUEUE_FULL, message, retry_after_s=self._retry_after_s)\n",
        "            raise Refused(Refusal.QUEUE_FULL, message)\n",
        ("tests/unit/router",),
    ),
    Mutant(
        "a request that would miss its TTFT target is rejected",
        "router/placement/scheduler.py",
        "        if ttft_s <= limit_s:\n            return None\n",
        "        if True:\n            return None\n",
        _ADMISSION_TESTS,
    ),
    Mutant(
        "the wait for decode workers is part of the TTFT",
        "router/placement/scheduler.py",
        "        if request.decodes:\n            wait_s = max(",
        "        if False:\n            wait_s = max(",
        (*_ADMISSION_TESTS, "tests/unit/capacity/simulation/test_overload.py"),
    ),
    Mutant(
        "workers that refuse because they are full count in predictions",
        "router/placement/policy.py",
        "if takes(worker) and not worker.info.not_ready), most))",
        "if takes(worker) and not worker.refusing), most))",
        _ADMISSION_TESTS,
    ),
    Mutant(
        "tenants take turns",
        "router/placement/queue.py",
        "        self._given[tenant] = max(self._given.get(tenant, 0.0), self._level) + tokens\n",
        "        self._given[tenant] = max(self._given.get(tenant, 0.0), self._level)\n",
        _QUEUE_TESTS,
    ),
    Mutant(
        "the requests of a tenant are ordered by priority",
        "router/placement/queue.py",
        "    return request.priority, request.start_by_s, request.sequence\n",
        "    return 0, request.start_by_s, request.sequence\n",
        _QUEUE_TESTS,
    ),
    Mutant(
        "a request whose client is answered already goes first",
        "router/placement/queue.py",
        "        if self._resumed:\n            return min(",
        "        if False:\n            return min(",
        _QUEUE_TESTS,
    ),
    Mutant(
        "a request does not wait longer than queue_timeout_s",
        "router/requests/sweeper.py",
        "self._owner.waited_s(request) > self._config.queue_timeout_s",
        "False",
        ("tests/unit/router",),
    ),
    Mutant(
        "a request of silent workers is tried elsewhere",
        "router/requests/sweeper.py",
        "        if placed and now - request.last_event_s > self._config.stall_timeout_s:\n",
        "        if False:\n",
        ("tests/unit/router",),
    ),
    Mutant(
        "prompt and answer fit into the context",
        "router/requests/validation.py",
        "        if prompt + max_tokens > limit:\n",
        "        if False:\n",
        (*_API_TESTS, "tests/unit/router/test_generate.py"),
    ),
    Mutant(
        "the number of stop strings is limited",
        "router/requests/validation.py",
        "        if len(options.stop) > most:\n",
        "        if False:\n",
        _API_TESTS,
    ),
    Mutant(
        "a number that is not a number is refused",
        "router/requests/validation.py",
        "if value is not None and not low <= value <= high:",
        "if value is not None and (value < low or value > high):",
        _API_TESTS,
    ),
    Mutant(
        "two running requests of a tenant have different ids",
        "router/requests/dispatch.py",
        "        if self._live.of_client(first.tenant, first.request_id):\n",
        "        if False:\n",
        ("tests/unit/router",),
    ),
    Mutant(
        "a router that shuts down takes no requests",
        "router/requests/dispatch.py",
        "        if self._draining:\n            return self._leaving()\n        return None",
        "        return None",
        ("tests/unit/router",),
    ),
    Mutant(
        "a tenant's abort ends only its own requests",
        "router/requests/live_requests.py",
        "self._by_client_id.get((tenant, request_id), ())",
        "next((some for (_, name), some in self._by_client_id.items() if name == request_id), ())",
        ("tests/unit/router",),
    ),
)
