"""What calls cost: CPU time and time by the clock, by part."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any
from unittest.mock import patch


class Stopwatch:
    """µs of CPU and by the clock of each call, by part; parts of one thread each."""

    def __init__(self) -> None:
        self.spent: dict[str, list[tuple[float, float]]] = defaultdict(list)

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        clock, cpu = time.perf_counter_ns(), time.thread_time_ns()
        yield
        self.spent[part].append(((time.thread_time_ns() - cpu) / 1e3, (time.perf_counter_ns() - clock) / 1e3))

    @contextlib.contextmanager
    def on(self, owner: type, method: str, part: str) -> Iterator[None]:
        """Time what `owner` does in `method`, unless it was nothing."""
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
