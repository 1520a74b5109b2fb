"""Chooses the checks and runs them one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from rich.console import Console

from tandem.cli.check.checks import CHECKS, Check
from tandem.cli.check.pair import hand_overs
from tandem.cli.check.restart import restart
from tandem.cli.check.run import CheckResult, CheckRun, CheckSettings
from tandem.cli.check.server import CheckedServer
from tandem.protocol.errors import InvalidArgument, Unavailable

RESTART = "restart"


def chosen_checks(only: Sequence[str], *, pair: bool, restart_command: str) -> dict[str, Check]:
    """Return the checks with these names, or all; the check of a restart only if its command is given.

    Raises InvalidArgument for an unknown name.
    """
    checks = dict(CHECKS)
    if pair:
        checks["hand-overs"] = hand_overs
    if restart_command:
        checks[RESTART] = partial(restart, command=restart_command)
    elif RESTART in only:
        raise InvalidArgument("--restart-command", "is missing; the check of a restart runs it")
    if unknown := [name for name in only if name not in checks]:
        raise InvalidArgument("--only", f"{unknown[0]!r} is not a check; choose from {', '.join(checks)}")
    return {name: check for name, check in checks.items() if not only or name in only}


async def run_checks(server: CheckedServer, checks: Mapping[str, Check], settings: CheckSettings) -> list[CheckResult]:
    """Run the checks and return their results, with the progress on stderr.

    Raises Unavailable if the server does not answer, or if other requests run on it.
    """
    results = []
    try:
        await server.probe()
        if others := await server.idle_within(settings.settle_s):
            raise Unavailable(f"{server.url} has {others} other requests; check a server without other load")
        with Console(stderr=True).status("") as status:
            for name, check in checks.items():
                status.update(f"checking {name}")
                run = CheckRun(name, server, settings)
                await check(run)
                results.append(run.result())
    finally:
        await server.close()
    return results
