"""Settings of each worker, except those of its engine."""

from dataclasses import dataclass
from pathlib import Path

from tandem.protocol.policy_name import BACKLOG_BUDGET, CHUNKED_BUDGET, DEFAULT_STEP_POLICY, PolicyName
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.settings.ceilings import Ceilings, parse_ceilings
from tandem.settings.engine import GIB
from tandem.settings.parsing import absolute
from tandem.settings.setting import Settings, Topic, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings(Settings):
    """The settings of a worker: its steps, its KV transfers, and its limits."""

    step_policy: PolicyName = setting(
        DEFAULT_STEP_POLICY,
        help="Prompt tokens in a mixed step: unchunked = as many as fit, chunked = what --step-budget leaves,"
        " decode-priority = the same, but only beside requests without a target. None exceeds the targets of the"
        " requests' classes.",
        topic=Topic.STEPS,
        choices=PolicyName,
    )
    step_budget: int | None = setting(
        None,
        help=f"Maximum tokens of a mixed step, decode rows included; default: {CHUNKED_BUDGET}, for decode-priority"
        f" up to {BACKLOG_BUDGET} while prompts wait longer for a worker than they take to compute.",
        topic=Topic.STEPS,
        least=1,
    )
    itl_target_s: float | None = setting(
        None,
        help="Maximum inter-token latency of any request: batches and prefill chunks grow no further; default: only the"
        " targets of service classes.",
        topic=Topic.STEPS,
        option="itl-target-ms",
        unit=1e-3,
        above=0,
    )
    """The batch does not grow while its decode steps exceed the target; prompts use the time that decoding leaves."""
    prefix_cache: bool = setting(
        True,
        help="Keep KV pages, while memory allows, for requests with a common prefix.",
        topic=Topic.ENGINE,
        aliases=("--enable-prefix-caching",),
    )
    kv_host_bytes: int = setting(
        0,
        help="Host memory in which each worker keeps KV pages that its pool evicts, for requests with the same prefix;"
        " default: none.",
        topic=Topic.ENGINE,
        option="kv-host-gib",
        kind=float,
        unit=GIB,
        least=0,
        most=1 << 50,
    )
    kv_disk_bytes: int = setting(
        0,
        help="Files in --kv-disk-path in which each worker keeps KV pages that its host memory (--kv-host-gib) or its"
        " pool evicts, also over restarts; default: none.",
        topic=Topic.ENGINE,
        option="kv-disk-gib",
        kind=float,
        unit=GIB,
        least=0,
        most=1 << 50,
    )
    kv_disk_path: Path | None = setting(
        None,
        help="Folder of --kv-disk-gib, on a local disk; each worker has a folder of its own in it.",
        topic=Topic.ENGINE,
        parse=absolute,
    )
    speculate: SpeculationMethod = setting(
        SpeculationMethod.AUTO,
        help="Speculative decoding: ngram = verify what followed the last tokens when they occurred before, several"
        " tokens a step where that pays; suffix = also in earlier answers of the tenant; draft = what the model or"
        " heads of --draft propose; mtp = what the multi-token prediction layer of the checkpoint proposes; off; auto ="
        " ngram on a CPU, off on GPUs. Answers are the same.",
        topic=Topic.SPECULATION,
        choices=SpeculationMethod,
    )
    kv_checksum_rate: float = setting(
        0.05,
        help="Fraction of each transfer's KV pages whose checksums are verified on arrival, 0 to 1.",
        topic=Topic.KV_TRANSFER,
        least=0,
        most=1,
    )
    """Unless the rate is 0, at least one page per prompt is verified. The handshake checks that the rates agree."""
    kv_lease_s: float = setting(
        5.0,
        help="Seconds that a decode worker keeps its reservation for a request of a silent router.",
        topic=Topic.KV_TRANSFER,
        least=1,
        most=600,
    )
    kv_transfer_deadline_s: float = setting(
        30.0,
        help="Seconds that a KV page write may take before its prompt is computed again.",
        topic=Topic.KV_TRANSFER,
        least=1,
        most=600,
    )
    """The same deadline applies to a decode worker's check of the received pages."""
    kv_quarantine_share: float = setting(
        0.5,
        help="Fraction of a worker's KV pages in quarantine above which it accepts no requests.",
        topic=Topic.KV_TRANSFER,
        least=0,
        most=1,
    )
    """Above this share the worker registers as not ready.

    It becomes ready again when enough quarantined pages are free. Pages to which a silent prefill worker may write are
    free once that worker releases them; pages that are still being sent are free once the decode worker has them.
    """
    outlive_s: float = setting(
        0.0,
        help="With --address: seconds that workers wait for another `tandem up` of the same --cluster-name and --token"
        " to take them over when this one is gone, or was stopped by SIGTERM; 0 = they end with it.",
        topic=Topic.HOSTS,
        option="workers-outlive",
        least=0,
    )
    trusted_network: bool = setting(
        False,
        help="Only workers can reach workers over the network: let KV pages cross it, which workers on several hosts"
        " need. UCX then listens at each worker, and every client that connects can write into its memory.",
        topic=Topic.HOSTS,
        position=1,
    )
    """All workers of a cluster need the same value, which the handshake checks."""
    ceilings: Ceilings | None = setting(
        None,
        help="TFLOPS:GBPS that a worker's device can do at best; utilization and `tandem why` go by it. Default: what"
        " each measures at its start.",
        topic=Topic.ENGINE,
        option="device-ceilings",
        kind=str,
        parse=parse_ceilings,
    )

    step_deadline_s: float | None = None
    """The duration of a step after which its engine counts as stuck, in seconds; None = 60 on GPUs, 600 on CPUs.

    The worker's requests then fail, and its process ends. CPUs have the longer deadline because their large steps are
    slow.
    """
    transfer_backend: str = "nixl"
    """The transport of KV pages; only `nixl` exists."""
    quarantine_s: float = 5.0
    """Seconds of quarantine for the pages to which a dead prefill worker on the same host may have written.

    The quarantine begins at the end of the prefill worker's write window; after the quarantine the pages are free.
    """
    quarantine_far_s: float = 60.0
    """Like `quarantine_s`, for a prefill worker on another or unknown host, whose writes may arrive much later."""
    write_window_s: float = 10.0
    """Seconds for which a prefill worker may write to its reserved pages until it must renew the permission."""
    lease_retry_after_s: float = 0.2
    """The retry hint, in seconds, of the error for a KV reservation that is refused."""
    rpc_timeout_s: float = 5.0
    """Deadline of each call to another worker or the controller, in seconds."""
    attach_grace_s: float = 5.0
    """Seconds for which requests continue while their router has no event stream to this worker."""
    max_prefill_requests: int = 1024
    """The maximum number of requests in prefill on a worker, waiting or running.

    Routers keep requests in their own queue, so this limit is rarely reached.
    """
    max_prefill_rows: int = 64
    """The maximum number of prompt chunks in one step."""
