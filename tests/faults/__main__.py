"""Faults of real processes under mixed load: `python -m tests.faults --minutes 10 --seed 1`.

Starts a cluster of prefill and decode workers on the CPU, and strikes one part after the other, in a random order that
the seed determines, until the time is over. The JSON in benchmarks/results has the tries and outcomes of each fault.
The exit code is 1 if an answer was wrong or had no end, if pages or requests remain at the end, or if more requests
than `--min-saved` allows ended with an error that no fault may cause.

Run as root, it has a network namespace and a file system of its own; otherwise it has no faults of these.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from benchmarks.results import RESULTS, run_facts, save_result
from tandem.net.rpc import open_client_channel
from tandem.settings.cluster import ClusterSettings
from tests.certificates import Authority, files_of
from tests.faults.fault_kinds import FAULTS, SLOW, Fault, Scene
from tests.faults.injected_faults import InjectedFaults
from tests.faults.joined import short_folder
from tests.faults.mixed_load import FaultRecord, MixedLoad
from tests.faults.subjects import SUBJECTS, EngineJudge, Subject
from tests.running_cluster import RunningCluster

START_WITHIN_S = 600.0
APART_S = 1.2
"""The mean time between two faults: 500 in ten minutes."""
ATTEMPTS_MAX = 20
"""The attempts of a request: many more than by default, because more faults strike it than in any cluster."""
OWN_NAMESPACES = "TANDEM_FAULTS_NAMESPACES"
POOL_BYTES, HOST_BYTES, DISK_BYTES = 80 << 20, 16 << 20, 192 << 20
"""The pool, which cannot hold all prompts, and the tiers of each worker."""


async def campaign(
    scene: Scene, load: MixedLoad, faults: Sequence[Fault], minutes: float, apart_s: float = APART_S
) -> list[FaultRecord]:
    """Strike until the time is over; each fault is tried before any is tried again, and faults of parts overlap."""
    records = {fault.name: FaultRecord(fault.name, fault.may_cause) for fault in faults}
    await load.start()
    striking: set[str] = set()
    """The parts that a fault strikes."""

    async def strike(fault: Fault) -> None:
        record = records[fault.name]
        over = load.struck(record)
        if not await fault.strike(scene):
            record.tries -= 1
        over()
        striking.remove(fault.part)
        print(f"{fault.name}: {record.tries} tries, {dict(record.answers)} {record.messages or ''}", flush=True)

    end_s, turn = time.monotonic() + 60 * minutes, list[Fault]()
    async with asyncio.TaskGroup() as tasks:
        while time.monotonic() < end_s:
            turn = turn or scene.rng.sample(list(faults), len(faults))
            ready = next((fault for fault in turn if fault.part not in striking), None)
            if ready is not None:
                turn.remove(ready)
                striking.add(ready.part)
                tasks.create_task(strike(ready))
            await asyncio.sleep(scene.rng.uniform(0, 2 * apart_s))
    await load.recovered()
    await load.stop()
    return [*records.values(), load.undisturbed]


def failures(records: Sequence[FaultRecord]) -> list[str]:
    """Return the answers that no fault allows."""
    return [f"{one.name}: {detail}" for one in records for detail in one.details]


def as_result(record: FaultRecord) -> dict[str, Any]:
    """Return a record as the results have it."""
    fault = FAULTS.get(record.name)
    return {
        "fault": record.name,
        "part": fault.part if fault else "",
        "act": fault.act if fault else "",
        "may_cause": record.may_cause,
        "tries": record.tries,
        "answers": dict(record.answers),
        "longest_gap_s": round(max(record.gaps_s, default=0.0), 2),
        "messages": record.messages,
        "details": record.details,
    }


def run(options: argparse.Namespace, folder: Path, subject: Subject) -> tuple[list[FaultRecord], MixedLoad]:
    """Run one campaign on a cluster of its own; return the outcome, and the load."""
    rng = random.Random(options.seed)
    authority, injected = Authority("faults"), InjectedFaults(folder)
    os.environ.update(injected.environment)
    disk = Path("/mnt") if os.environ.get(OWN_NAMESPACES) else None
    tls = files_of(folder, authority.issue("server"))
    settings = {
        "prefill": options.workers,
        "decode": options.workers,
        "start_timeout_s": START_WITHIN_S,
        "grpc_port": 0,
        "http_port": 0,
        "threads": 1,
        "dtype": "float32",
        "kv_checksum_rate": 1.0,
        "page_tokens": 16,
        "kv_cache_bytes": POOL_BYTES,
        "kv_host_bytes": HOST_BYTES,
        "kv_disk_bytes": DISK_BYTES if disk else 0,
        "kv_disk_path": disk,
        "max_step_tokens": 128,
        "max_attempts": ATTEMPTS_MAX,
        "tls": tls,
        "trusted_network": bool(disk),
        **subject.settings,
    }
    cluster = RunningCluster(ClusterSettings.of(model=subject.model, **settings), options.logs or folder / "logs")
    try:
        scene = Scene(cluster, rng, injected, disk, folder, authority, has_network=bool(os.environ.get(OWN_NAMESPACES)))
        chosen = [FAULTS[name] for name in options.faults or FAULTS]
        ranks = any(name.endswith("size") for name in subject.settings)
        faults = [fault for fault in chosen if not fault.missing(scene) and (ranks or fault.part != "rank")]
        print("not tried:", ", ".join(fault.name for fault in chosen if fault not in faults) or "none", flush=True)

        async def disturbed() -> tuple[list[FaultRecord], MixedLoad]:
            credentials = grpc.ssl_channel_credentials(authority.pem)
            async with open_client_channel(cluster.grpc_address.removeprefix("https://"), credentials) as channel:
                load = MixedLoad(
                    f"https://{cluster.http_address.removeprefix('https://')}/v1",
                    options.seed,
                    trust=authority.trusted(),
                    judge=EngineJudge(subject),
                    adapter=subject.adapter,
                    channel=channel,
                )
                return await campaign(scene, load, faults, options.minutes), load

        outcome = asyncio.run(disturbed())
        cluster.assert_idle_and_sound()
        return outcome
    finally:
        cluster.stop()


UNSHARE = ("unshare", "--net", "--mount")
OWN = f"ip link set lo up && mount -t tmpfs -o size={3 * DISK_BYTES} faults /mnt"
"""The command that completes the namespaces."""


def enter_namespaces() -> None:
    """Continue in a network namespace and a mount namespace of its own, with a file system in memory, if allowed."""
    if os.environ.get(OWN_NAMESPACES):
        subprocess.run(["sh", "-c", OWN], check=True)
        # KV goes through the network that is disturbed, not through shared memory.
        os.environ["UCX_TLS"] = "tcp,self"
    elif all(map(shutil.which, ("unshare", "ip", "tc", "ss"))):
        rehearsal = f"{OWN} && tc qdisc replace dev lo root {SLOW}"
        if not subprocess.run([*UNSHARE, "sh", "-c", rehearsal], capture_output=True, check=False).returncode:
            command = [*UNSHARE, sys.executable, "-m", "tests.faults", *sys.argv[1:]]
            os.execvpe(command[0], command, {**os.environ, OWN_NAMESPACES: "1"})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults, after the start of the cluster")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of requests and faults")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON of tries and outcomes")
    parser.add_argument("--workers", type=int, default=2, help="of each role")
    parser.add_argument(
        "--min-saved", type=float, default=0.999, help="the least share of requests that end well, of those that can"
    )
    parser.add_argument("--logs", type=Path, help="folder for the logs of all processes; default: they are not kept")
    parser.add_argument("--cluster", choices=SUBJECTS, default="smollm2", help="model and ranks of the cluster")
    parser.add_argument(
        "--faults",
        type=lambda names: names.split(","),
        help=f"names, separated by commas; default all: {', '.join(FAULTS)}",
    )
    options = parser.parse_args()
    if unknown := set(options.faults or ()) - FAULTS.keys():
        parser.error(f"--faults: {', '.join(sorted(unknown))} is none of {', '.join(FAULTS)}")
    enter_namespaces()
    print(f"seed {options.seed}", flush=True)
    with short_folder() as folder:
        subject = SUBJECTS[options.cluster](folder)
        records, load = run(options, folder, subject)
    well, errors = load.ended_well, sum(one.not_saved for one in records)
    result = {
        **run_facts("cpu"),
        "model": subject.name,
        "dtype": "float32",
        "seed": options.seed,
        "minutes": options.minutes,
        "clients": load.clients,
        "workers": options.workers,
        "max_attempts": ATTEMPTS_MAX,
        "ended_well": well,
        "not_saved": errors,
        "faults": [as_result(record) for record in records],
    }
    print(save_result("faults", result, options.out))
    print(
        f"{sum(one.tries for one in records)} faults, {well} requests ended well, {errors} that could be saved did not"
    )
    wrong = failures(records)
    print("\n".join(wrong or ["no answer was wrong"]))
    return bool(wrong) or well < options.min_saved * (well + errors)


if __name__ == "__main__":
    sys.exit(main())
