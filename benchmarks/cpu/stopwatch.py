"""Measures the CPU time and the elapsed time of calls, by part."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from unittest.mock import patch


class Stopwatch:
    """CPU time and elapsed time of each call in µs, by part; each part belongs to one thread."""

    def __init__(self) -> None:
        self.spent: dict[str, list[tuple[float, float]]] = defaultdict(list)

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Times the context as one call of `part`."""
        clock, cpu = time.perf_counter_ns(), time.thread_time_ns()
        yield
        self.spent[part].append(((time.thread_time_ns() - cpu) / 1e3, (time.perf_counter_ns() - clock) / 1e3))

    @contextlib.contextmanager
    def on(self, owner: type, method: str, part: str) -> Iterator[None]:
        """Times `owner.method` within the context; a plan without a result does not count."""
        timed: Callable[..., Any] = getattr(owner, method)

        @wraps(timed)
        def call(*args: Any, **options: Any) -> Any:
            clock, cpu = time.perf_counter_ns(), time.thread_time_ns()
            result = timed(*args, **options)
            spent = (time.thread_time_ns() - cpu) / 1e3, (time.perf_counter_ns() - clock) / 1e3
            if part != "plan" or result is not None:
                self.spent[part].append(spent)
            return result

        with patch.object(owner, method, call):
            yield
