"""Attacks on a cluster, one after the other, and the longest waits of another tenant: `python -m tests.hostile`.

A row is an attack: the longest gap between tokens and the longest wait for a first token of a tenant that streams
meanwhile, the numbers of its answers and of its tries that failed, and by how much the memory of the cluster's
processes had grown at most 30 s later. The attack `none` is the same without any. It exits with 1 if a process died
that the attack did not kill, if an answer failed, if memory did not return, or if a gap was longer than `--max-gap`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.hostile.attacks import ATTACKS, Attack
from tests.hostile.bystander import Bystander, Waits
from tests.hostile.scene import Scene, until

GROWTH_BYTES_MAX = 256 << 20
"""Caches of tokenizers and grammars may stay; the attacks used to leave gigabytes."""
SETTLES_WITHIN_S = 30.0
ROW = "{:<20}{:>16}{:>16}{:>9}{:>9}{:>12}  {}"


def run(scene: Scene, attack: Attack) -> tuple[Waits, float, list[str]]:
    """Run one attack; returns the waits of the other tenant, the growth of memory in MiB, and what went wrong."""
    pids, memory = scene.pids(), sum(scene.memory().values())
    with Bystander(scene.http, scene.bystander) as bystander:
        attack.run(scene)
        time.sleep(1.0)
    wrong = list(bystander.waits.failures)
    if bystander.waits.retries and not attack.disconnects:
        wrong.append(f"an answer failed and was sent again: {bystander.waits.why}")
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
    parser.add_argument("--max-gap", type=float, default=0.5, metavar="SECONDS", help="longest gap on a quiet machine")
    options = parser.parse_args()
    chosen = options.attacks
    if unknown := set(chosen) - {attack.name for attack in ATTACKS}:
        parser.error(
            f"no attack is called {', '.join(sorted(unknown))}; there are {', '.join(a.name for a in ATTACKS)}"
        )
    failed = False
    print(ROW.format("attack", "longest gap ms", "first token ms", "answers", "retries", "memory MiB", "wrong"))
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder))
        try:
            for attack in (attack for attack in ATTACKS if not chosen or attack.name in chosen):
                waits, growth, wrong = run(scene, attack)
                if waits.gap_s > options.max_gap:
                    wrong.append(f"a gap of more than {options.max_gap:g} s")
                failed |= bool(wrong)
                gap, first = 1e3 * waits.gap_s, 1e3 * waits.first_token_s
                row = f"{gap:,.0f}", f"{first:,.0f}", waits.answers, waits.retries, f"{growth:+,.0f}"
                print(ROW.format(attack.name, *row, "; ".join(wrong)[:200]), flush=True)
        finally:
            scene.cluster.stop()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
