"""Mutants of the page pool, the prefix cache and the budget of pages."""

from tests.mutants.mutant import Mutant

_POOL = "tandem/engine/cache/page_pool.py"
_POOL_TESTS = ("tests/unit/engine/cache/test_page_pool.py", "tests/unit/engine/cache/test_page_pool_model.py")
_BUDGET_TESTS = ("tests/unit/decode_worker/test_page_budget.py", "tests/unit/decode_worker/test_page_forecasts.py")
_DIGEST_TESTS = ("tests/unit/engine/cache/test_prefix_cache.py", "tests/unit/router/placement/test_prefix_index.py")

MUTANTS = (
    Mutant(
        "reserved pages are not allocated to others",
        _POOL,
        "        return len(self._free) + len(self._cached) - self._reserved\n",
        "        return len(self._free) + len(self._cached)\n",
        _POOL_TESTS,
    ),
    Mutant(
        "a reservation is spent once",
        _POOL,
        "        self._reserved -= pages\n\n    def _need(",
        "        self._reserved -= 0\n\n    def _need(",
        _POOL_TESTS,
    ),
    Mutant(
        "a page with readers is not evicted",
        _POOL,
        "                if self._shared[page] == 0:\n",
        "                if self._shared[page] >= 0:\n",
        _POOL_TESTS,
    ),
    Mutant(
        "each reader counts",
        _POOL,
        "                self._shared[page] = self._shared.get(page, 0) + 1\n",
        "                self._shared[page] = 1\n",
        _POOL_TESTS,
    ),
    Mutant(
        "an owner frees only its own pages",
        _POOL,
        '        if strangers or len(set(pages)) != len(pages):\n            raise Internal(\n                f"{owner',
        '        if False:\n            raise Internal(\n                f"{owner',
        _POOL_TESTS,
    ),
    Mutant(
        "a quarantined page is not free",
        _POOL,
        "            self._quarantined[lease] = pages\n            return list(pages)",
        "            self._make_free(pages)\n            return list(pages)",
        _POOL_TESTS,
    ),
    Mutant(
        "an ended lease gets no pages",
        _POOL,
        "            if lease in self._quarantined:\n",
        "            if False:\n",
        _POOL_TESTS,
    ),
    Mutant(
        "an evicted page leaves the prefix index",
        _POOL,
        "            self._free.give([page])\n            self._on_taken(page)\n",
        "            self._free.give([page])\n",
        (*_POOL_TESTS, "tests/unit/engine/cache/test_prefix_cache.py"),
    ),
    Mutant(
        "prompts with different salts share no pages",
        "tandem/protocol/page_digests.py",
        "blake2b(salt.encode(), digest_size",
        'blake2b(b"", digest_size',
        (*_DIGEST_TESTS, "tests/unit/router/api/test_one_key_one_tenant.py"),
    ),
    Mutant(
        "a page is found only after the pages before it",
        "tandem/protocol/page_digests.py",
        "        parent = state.digest()\n",
        "        digests.append(state.digest())\n        continue\n",
        _DIGEST_TESTS,
    ),
    Mutant(
        "tenants share no pages",
        "router/access/tenants.py",
        '    own = f"{tenant}/{salt}" if tenant or salt else ""\n',
        "    own = salt\n",
        ("tests/unit/router/access", "tests/unit/router/api/test_one_key_one_tenant.py"),
    ),
    Mutant(
        "adapters share no pages",
        "router/access/tenants.py",
        '    return f"adapter:{adapter}/{own}" if adapter else own\n',
        "    return own\n",
        ("tests/unit/router/access", "tests/unit/router/adapters"),
    ),
    Mutant(
        "a decode worker promises no more pages than it has",
        "decode_worker/page_budget.py",
        "        if short or (self._limit is not None and self.committed + pages > self._limit):\n",
        "        if False:\n",
        _BUDGET_TESTS,
    ),
    Mutant(
        "an answer that can never fit is refused",
        "decode_worker/page_budget.py",
        "        if most > self._limit:\n",
        "        if False:\n",
        (*_BUDGET_TESTS, "tests/unit/worker/test_validation.py"),
    ),
    Mutant(
        "a worker that leaves takes no further answers",
        "decode_worker/page_budget.py",
        "        if self._closed:\n            raise RoleClosed",
        "        if False:\n            raise RoleClosed",
        (*_BUDGET_TESTS, "tests/unit/worker/test_assignment.py"),
    ),
    Mutant(
        "a worker of both roles keeps pages for prompts",
        "tandem/protocol/ending.py",
        "    return None if role is not Role.BOTH else total - min(total // 2, longest)\n",
        "    return None\n",
        ("tests/unit/decode_worker", "tests/unit/router/placement"),
    ),
)
