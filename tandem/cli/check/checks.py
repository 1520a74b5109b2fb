"""The checks of `tandem check`: each sends requests whose clients behave in one way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from tandem.cli.check.answer import Answer
from tandem.cli.check.request import CheckRequest
from tandem.cli.check.run import Allowed, CheckRun

Check = Callable[[CheckRun], Awaitable[None]]
DEADLINES = 10
"""The number of moments in the duration of a request at which its client's timeout ends."""


async def aborts(run: CheckRun) -> None:
    """Clients leave while their requests are queued, in prefill, at the first token, while they decode, at the end.

    The other requests must be answered right, and so must the same prompts when they are sent again.
    """
    for _ in range(run.settings.rounds):
        requests = [run.request() for _ in range(run.settings.concurrency)]
        alone = await run.reference(requests[0])
        leaving = [_leave(request, phase, alone) for phase, request in enumerate(requests) if phase % 4]
        await run.wave([*leaving, *requests[::4]])
        await run.wave(requests)
    await run.settle()


def _leave(request: CheckRequest, phase: int, alone: Answer) -> CheckRequest:
    """Return the request with a client that leaves; `alone` is the answer to such a request when no other one runs."""
    events = max(1, alone.events)
    phases = [
        {"leave_after_s": 0.0},
        {"leave_after_s": alone.first_token_s / 3},
        {"leave_after_s": alone.first_token_s * 2 / 3},
        {"leave_after_events": 1},
        {"leave_after_events": min(2, events)},
        {"leave_after_events": max(1, events // 2)},
        {"leave_after_events": max(1, events - 1)},
    ]
    return replace(request, **phases[phase % len(phases)])  # type: ignore[arg-type]


async def reused_pages(run: CheckRun) -> None:
    """All clients leave during prefill and at the first token; at once, other prompts of the same length follow.

    The KV pages of the cancelled prompts are then used again. At last the cancelled prompts are sent again, which must
    not find pages in a prefix cache that were never written.
    """
    for _ in range(run.settings.rounds):
        cancelled = [run.request() for _ in range(run.settings.concurrency)]
        others = [run.request() for _ in cancelled]
        for request in (*cancelled, *others):
            alone = await run.reference(request)
        await run.wave([_leave(request, 1 + number % 3, alone) for number, request in enumerate(cancelled)])
        await run.wave(others)
        await run.wave(cancelled)
    await run.settle()


async def duplicate_ids(run: CheckRun) -> None:
    """Requests with the same X-Request-Id run at once, one client leaves, and a later request has the id again.

    Each request must get its own answer; a server may refuse an id that is in use.
    """
    for number in range(run.settings.rounds):
        name = f"check-{run.settings.seed}-{number}"
        first, *others = (replace(run.request(), request_id=name) for _ in range(max(2, run.settings.concurrency)))
        await run.wave([first, replace(first), *others], Allowed.REFUSAL)
        await run.wave([replace(first, leave_after_events=1), *others], Allowed.REFUSAL)
        await run.wave([others[0]], Allowed.REFUSAL)
    await run.settle()


async def slow_readers(run: CheckRun) -> None:
    """Half of the clients stop reading after the first event until the others have their answers, then read on.

    The others must be answered right. A server may close a connection that is not read, but what arrived must be right.
    """
    for _ in range(run.settings.rounds):
        requests = [run.request() for _ in range(run.settings.concurrency)]
        half = len(requests) // 2
        pausing = [replace(request, pauses=True, logprobs=True) for request in requests[:half]]
        await run.wave([*pausing, *requests[half:]])
    await run.settle()


async def deadlines(run: CheckRun) -> None:
    """The timeouts of clients that do not stream end at ten moments of their requests' duration.

    The server must notice that they have left, and answer the same prompts right afterwards.
    """
    for _ in range(run.settings.rounds):
        requests = [replace(run.request(), stream=False) for _ in range(DEADLINES)]
        alone = await run.reference(requests[0])
        moments = [alone.duration_s * (number + 0.5) / DEADLINES for number in range(DEADLINES)]
        leaving = zip(requests, moments, strict=True)
        await run.wave([replace(request, leave_after_s=moment) for request, moment in leaving])
        await run.wave(requests)
    await run.settle()


async def same_prompt(run: CheckRun) -> None:
    """The same prompt is sent many times, some at a time, and always has the same answer."""
    request = run.request()
    await run.reference(request)
    texts: set[str] = set()
    remaining = iter(range(run.settings.repeats))

    async def client() -> None:
        for _ in remaining:
            answer = await run.server.send(request)
            await run.judge(request, answer, Allowed.NONE)
            texts.add(answer.text)

    await asyncio.gather(*(client() for _ in range(run.settings.concurrency)))
    run.notes.append("one answer" if len(texts) == 1 else f"{len(texts)} different answers")


async def usage(run: CheckRun) -> None:
    """The usage counts the tokens that were sent, the same in every form of the request."""
    request = replace(run.request(), logprobs=True)
    forms = [
        request,
        replace(request, stream=False),
        replace(request, max_tokens=1),
        replace(request, n=2),
        replace(request, n=2, stream=False),
    ]
    tokenized = await run.server.prompt_tokens(request.prompt)
    expected = (await run.reference(request)).usage.get("prompt_tokens") if tokenized is None else tokenized
    if tokenized is None:
        run.notes.append("prompts are not counted by /tokenize, which the server does not have")
    for form in forms:
        (answer,) = await run.wave([form])
        if answer.error:
            continue
        for wrong in _usage_errors(form, answer, expected, "logprobs" not in run.server.unsupported):
            run.fail(wrong, form)


def _usage_errors(request: CheckRequest, answer: Answer, prompt_tokens: object, with_logprobs: bool) -> list[str]:
    used = answer.usage
    if not used:
        return ["the answer has no usage"]
    errors = []
    prompt, completion, total = (used.get(f"{kind}_tokens") for kind in ("prompt", "completion", "total"))
    if prompt != prompt_tokens:
        errors.append(f"prompt_tokens is {prompt}; the prompt has {prompt_tokens}")
    if with_logprobs and answer.counted_tokens and completion != answer.counted_tokens:
        errors.append(f"completion_tokens is {completion}, and {answer.counted_tokens} tokens were sent")
    if request.n == 1 and answer.finish_reason == "length" and completion != request.max_tokens:
        errors.append(f"completion_tokens is {completion} of an answer that ended at max_tokens {request.max_tokens}")
    if isinstance(prompt, int) and isinstance(completion, int) and total != prompt + completion:
        errors.append(f"total_tokens is {total}, and not {prompt} + {completion}")
    return errors


CHECKS: dict[str, Check] = {
    "aborts": aborts,
    "reused-pages": reused_pages,
    "duplicate-ids": duplicate_ids,
    "slow-readers": slow_readers,
    "deadlines": deadlines,
    "same-prompt": same_prompt,
    "usage": usage,
}
"""The checks of any server, by the names that `--only` takes."""
