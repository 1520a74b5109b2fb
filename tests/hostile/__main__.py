"""Attacks on a cluster, one after the other, and the longest waits of another tenant: `python -m tests.hostile`.

A row of the table is an attack: the longest gap between tokens and the longest wait for a first token of a tenant that
streams meanwhile, its answers and failures, and by how much the memory of the cluster's processes had grown 30 s later.
It fails if a process died that the attack did not kill, if an answer failed, or if memory did not return.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.hostile.attacks import ATTACKS, Attack
from tests.hostile.bystander import Bystander, Waits
from tests.hostile.scene import Scene, until

GROWTH_BYTES_MAX = 256 << 20
"""Caches of tokenizers and grammars may stay; the attacks used to leave gigabytes."""
SETTLES_WITHIN_S = 30.0


def run(scene: Scene, attack: Attack) -> tuple[Waits, float, list[str]]:
    """Run one attack; returns the waits of the other tenant, the growth of memory in MiB, and what went wrong."""
    pids, memory = scene.pids(), sum(scene.memory().values())
    with Bystander(scene.http, scene.bystander) as bystander:
        attack.run(scene)
        time.sleep(1.0)
    wrong = list(bystander.waits.failures)
    if not attack.kills:
        wrong += [f"{name} died" for name, pid in scene.pids().items() if pid != pids[name]]
    until(lambda: sum(scene.memory().values()) - memory < GROWTH_BYTES_MAX, SETTLES_WITHIN_S)
    growth = sum(scene.memory().values()) - memory
    if growth >= GROWTH_BYTES_MAX:
        wrong.append("memory did not return")
    return bystander.waits, growth / 2**20, wrong


def main() -> int:
    """Run the attacks that were named, or all."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("attacks", nargs="*", help="the names of attacks; all without any")
    chosen = parser.parse_args().attacks
    if unknown := set(chosen) - {attack.name for attack in ATTACKS}:
        parser.error(
            f"no attack is called {', '.join(sorted(unknown))}; there are {', '.join(a.name for a in ATTACKS)}"
        )
    console, failed = Console(), False
    table = Table("attack", "longest gap ms", "first token ms", "answers", "memory MiB", "wrong")
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        try:
            for attack in (attack for attack in ATTACKS if not chosen or attack.name in chosen):
                console.print(f"{attack.name} …")
                waits, growth, wrong = run(scene, attack)
                failed |= bool(wrong)
                gap, first = 1e3 * waits.gap_s, 1e3 * waits.first_token_s
                table.add_row(
                    attack.name,
                    f"{gap:,.0f}",
                    f"{first:,.0f}",
                    str(waits.answers),
                    f"{growth:+,.0f}",
                    "; ".join(wrong)[:200],
                )
        finally:
            scene.cluster.stop()
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
