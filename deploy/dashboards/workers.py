"""The dashboard of workers: processes, planner, engines, KV pages and hardware."""

from deploy.dashboards.grafana import Dashboard, Kind, Panel, Query, Row, Unit
from deploy.dashboards.promql import Selection, of_workers, peak_to_mean, quantile, rate, series, share, total
from tandem.metrics import families as f
from tandem.metrics.family import Family


def _process(name: str) -> Selection:
    """Select those series of a standard process metric that belong to Tandem: they have the label `worker`."""
    return Selection(f'{name}{{namespace=~"$namespace",model=~"$model",worker!=""}}')


def _rates(title: str, unit: Unit, family: Family, about: str = "") -> Panel:
    return Panel(title, unit, (Query(rate(of_workers(family), "worker"), "{{worker}}"),), about, width=6)


def _now(title: str, unit: Unit, family: Family, about: str = "") -> Panel:
    return Panel(title, unit, (Query(total(of_workers(family), "worker"), "{{worker}}"),), about, width=6)


def _of_ceiling(title: str, unit: Unit, done: Family, ceiling: Family, about: str) -> Panel:
    queries = (
        Query(rate(of_workers(done), "worker"), "{{worker}}"),
        Query(total(of_workers(ceiling), "worker"), "{{worker}} ceiling"),
    )
    return Panel(title, unit, queries, about, width=6)


_PROCESSES = Row(
    "Processes",
    (
        Panel(
            "Processes up",
            Unit.NUMBER,
            (Query(total(series(f.PROCESS_UP), "role"), "{{role}}"),),
            "As the controller sees them.",
            Kind.NUMBER,
            width=6,
        ),
        _now(
            "Ready",
            Unit.NUMBER,
            f.WORKER_READY,
            "0: takes no new requests; its log and `tandem status` give the reason.",
        ),
        Panel(
            "Restarts",
            Unit.NUMBER,
            (Query(total(series(f.PROCESS_RESTARTS), "worker"), "{{worker}}"),),
            "Since the cluster began.",
            width=6,
        ),
        _now("KV pool consistent", Unit.NUMBER, f.POOL_SOUND, "0: a defect; restart the worker and report its log."),
        Panel(
            "Responding to scrapes",
            Unit.NUMBER,
            (Query(total(series(f.TARGET_UP), "worker"), "{{worker}}"),),
            "0: it was up and did not respond to the latest scrape.",
            width=6,
        ),
        _now("Ranks", Unit.NUMBER, f.WORKER_RANKS, "GPUs of the worker, or processes on CPUs."),
        Panel(
            "Workers",
            Unit.NUMBER,
            (Query(total(series(f.WORKER_INFO, role="$role"), "worker", "role", "device", "dtype")),),
            kind=Kind.TABLE,
            width=9,
        ),
        Panel(
            "Models",
            Unit.NUMBER,
            (Query(total(of_workers(f.MODEL_INFO), "summary")),),
            kind=Kind.TABLE,
            width=12,
        ),
        Panel(
            "KV transports",
            Unit.NUMBER,
            (Query(total(of_workers(f.TRANSPORT), "worker", "transport")),),
            kind=Kind.TABLE,
            width=9,
        ),
    ),
)

_ENGINE = Row(
    "Engines",
    (
        _rates("Engine busy", Unit.SHARE, f.STEP_BUSY, "Share of the time in which the engine computes."),
        _now(
            "Memory bandwidth utilization",
            Unit.SHARE,
            f.BANDWIDTH_UTILIZATION,
            "Share of the device's ceiling, while it computes. Near 1, a decode worker is at its device's limit.",
        ),
        _now(
            "FLOPS utilization",
            Unit.SHARE,
            f.FLOPS_UTILIZATION,
            "Share of the device's ceiling, while it computes. Near 1, a prefill worker is at its device's limit.",
        ),
        _now(
            "Step time prediction error",
            Unit.SHARE,
            f.STEP_COST_ERROR,
            "Recent mean; placement relies on these predictions.",
        ),
        _of_ceiling(
            "Bytes read by steps",
            Unit.BYTES_A_SECOND,
            f.STEP_BYTES,
            f.DEVICE_BANDWIDTH,
            "Weights and KV, by the steps' shape; the ceiling is measured at each start.",
        ),
        _rates(
            "Collective operations",
            Unit.SHARE,
            f.STEP_COLLECTIVES,
            "Predicted share of the time in which the GPUs of a worker exchange data; no series with one GPU.",
        ),
        _of_ceiling("Floating-point operations", Unit.FLOPS, f.STEP_FLOPS, f.DEVICE_FLOPS, "By the steps' shape."),
        Panel(
            "CUDA graph hit ratio",
            Unit.SHARE,
            (
                Query(
                    share(
                        rate(of_workers(f.GRAPH_STEPS, graph="hit"), "worker"),
                        rate(of_workers(f.GRAPH_STEPS), "worker"),
                    ),
                    "{{worker}}",
                ),
            ),
            "0 on CPUs.",
            width=6,
        ),
        Panel(
            "Energy per token",
            Unit.JOULES,
            (
                Query(
                    share(rate(of_workers(f.STEP_ENERGY), "worker"), rate(of_workers(f.STEP_TOKENS), "worker")),
                    "{{worker}}",
                ),
            ),
            "Of the worker's GPUs, idle time included, per token of prompts and answers; empty on CPUs.",
            width=6,
        ),
        _rates("CUDA graph padding tokens", Unit.A_SECOND, f.GRAPH_PADDED_TOKENS, "Padding of CUDA graphs."),
        Panel(
            "Fitted step cost",
            Unit.SECONDS,
            (Query(total(of_workers(f.STEP_COST), "worker", "part"), "{{worker}} {{part}}"),),
            "As fitted: of each step, of those with prompts, and of each token, pair, row and token of context.",
        ),
        Panel(
            "Observed / predicted step time",
            Unit.NUMBER,
            (Query(quantile(0.99, of_workers(f.STEP_OVER_PREDICTED, "_bucket"), "phase"), "{{phase}}, p99"),),
            "Observed / predicted duration of a step.",
        ),
        _now(
            "Margin of mixed steps",
            Unit.NUMBER,
            f.STEP_MIXED_NOISE,
            "99th percentile of observed / predicted duration; prompt chunks shrink by this factor.",
        ),
        _now(
            "Free tokens per step",
            Unit.NUMBER,
            f.STEP_FREE_TOKENS,
            "Tokens whose arithmetic is hidden behind reading the weights.",
        ),
        Panel(
            "Busiest expert / mean",
            Unit.NUMBER,
            (
                Query(
                    peak_to_mean(rate(of_workers(f.EXPERT_TOKENS), "layer_group", "expert"), "layer_group"),
                    "{{layer_group}} third of the layers",
                ),
            ),
            "Load balance of a mixture of experts: 1 is even. Empty for other models.",
            width=6,
        ),
    ),
)

_SPECULATION = Row(
    "Speculative decoding",
    (
        _now(
            "Speed-up",
            Unit.NUMBER,
            f.SPECULATION_SPEEDUP,
            "Tokens per second of decode steps / those of steps without drafts, by the cost model; 1: no drafts.",
        ),
        Panel(
            "Accepted drafts by position",
            Unit.SHARE,
            (
                Query(
                    share(rate(of_workers(f.DRAFTS_ACCEPTED), "position"), rate(of_workers(f.DRAFTED), "position")),
                    "position {{position}}",
                ),
            ),
            "Share of verified drafts that became tokens, by position in the draft.",
            width=6,
        ),
        Panel(
            "Accepted drafts by source",
            Unit.SHARE,
            (
                Query(
                    share(
                        rate(of_workers(f.ACCEPTED_BY_SOURCE), "proposer", "match"),
                        rate(of_workers(f.DRAFTED_BY_SOURCE), "proposer", "match"),
                    ),
                    "{{proposer}} {{match}}",
                ),
            ),
            "Share of verified drafts that became tokens, by proposer and by the length of their match.",
            width=6,
        ),
        _rates("Drafted tokens", Unit.A_SECOND, f.DRAFTED, "Drafts that steps verified."),
        Panel(
            "Seconds saved",
            Unit.NUMBER,
            (
                Query(rate(of_workers(f.SPECULATION_SAVED), "worker"), "{{worker}} saved"),
                Query(rate(of_workers(f.SPECULATION_LOST), "worker"), "{{worker}} lost"),
                Query(rate(of_workers(f.SPECULATION_DRAFTING), "worker"), "{{worker}} proposing"),
            ),
            "Predicted decode seconds saved in a second, and lost where too few drafts were accepted; seconds in which"
            " a draft model or heads proposed.",
            width=6,
        ),
        Panel(
            "Memory of the draft model",
            Unit.BYTES,
            (Query(total(of_workers(f.SPECULATION_MODEL_BYTES), "worker", "kind"), "{{worker}} {{kind}}"),),
            "Its weights and its KV pages.",
            width=6,
        ),
    ),
    folded=True,
)

_KV = Row(
    "KV pages",
    (
        _now("KV pages in use", Unit.SHARE, f.KV_USAGE, "Including reserved pages; cached pages count as free."),
        Panel(
            "KV pages by state",
            Unit.NUMBER,
            (
                Query(
                    total(of_workers(f.KV_PAGES, state="free|owned|shared|cached|advertised|quarantined"), "state"),
                    "{{state}}",
                ),
            ),
            "All pages; reserved ones are among free and cached.",
            width=12,
            stacked=True,
        ),
        Panel(
            "KV pages held by transfers",
            Unit.NUMBER,
            (
                Query(total(of_workers(f.KV_PAGES, state="quarantined"), "worker"), "{{worker}} quarantined"),
                Query(total(of_workers(f.PENDING_TRANSFER_PAGES), "worker"), "{{worker}} pending"),
            ),
            "Quarantined: a prefill worker whose lease has expired may still write them. Pending: pages of ended"
            " prompts that unfinished writes still read.",
            width=6,
        ),
        _rates(
            "Reservations rejected for lack of KV pages",
            Unit.A_SECOND,
            f.KV_REFUSALS,
            "They wait in their router's queue and are retried.",
        ),
        Panel(
            "Prefix cache",
            Unit.A_SECOND,
            (Query(rate(of_workers(f.PREFIX_EVENTS), "worker", "event"), "{{worker}} {{event}}"),),
            "Many stored and removed at the same time: the cache is too small.",
            width=18,
        ),
    ),
)

_TIERS = Row(
    "Tiers of the prefix cache",
    (
        Panel(
            "Pages",
            Unit.A_SECOND,
            (Query(rate(of_workers(f.TIER_PAGES), "tier", "event"), "{{tier}} {{event}}"),),
            "Loaded: hits. Stored and evicted: the tier is full. Empty without tiers.",
            width=6,
        ),
        Panel(
            "Bytes",
            Unit.BYTES_A_SECOND,
            (Query(rate(of_workers(f.TIER_BYTES), "tier", "event"), "{{tier}} {{event}}"),),
            "Over all time, not only while pages are copied.",
            width=6,
        ),
        Panel(
            "Time of the copies",
            Unit.SHARE,
            (Query(rate(of_workers(f.TIER_SECONDS), "worker", "tier", "event"), "{{worker}} {{tier}} {{event}}"),),
            "The fraction of the time in which pages are stored or loaded.",
            width=6,
        ),
        Panel(
            "Used and available bytes",
            Unit.BYTES,
            (
                Query(total(of_workers(f.TIER_USED), "worker", "tier"), "{{worker}} {{tier}} used"),
                Query(total(of_workers(f.TIER_CAPACITY), "worker", "tier"), "{{worker}} {{tier}} limit"),
            ),
            "A tier that is never full is larger than the working set.",
            width=6,
        ),
        _rates(
            "Failed reads and writes",
            Unit.A_SECOND,
            f.TIER_FAILURES,
            "For example of a full disk; the pages are computed again.",
        ),
    ),
    folded=True,
)

_PLANNER = Row(
    "Planner",
    (
        Panel(
            "Load by role",
            Unit.SHARE,
            (Query(total(series(f.PLANNER_LOAD_RATIO), "role"), "{{role}}"),),
            "Predicted load / capacity; at 1 the service classes can just be met. Empty where the planner is off.",
            width=6,
        ),
        Panel(
            "Wanted workers",
            Unit.NUMBER,
            (Query(total(series(f.PLANNER_WANTED), "role"), "{{role}}"),),
            "Serving workers are under *Processes up*.",
            width=6,
        ),
        Panel(
            "Changes",
            Unit.NUMBER,
            (Query(total(series(f.PLANNER_CHANGES), "direction"), "{{direction}}"),),
            "Since the controller started; made, or only proposed in a dry run.",
            width=6,
        ),
        Panel(
            "Offered load",
            Unit.A_SECOND,
            (
                Query(rate(series(f.OFFERED_REQUESTS)), "requests"),
                Query(rate(series(f.OFFERED_PROMPT_TOKENS)), "prompt tokens"),
                Query(rate(series(f.OFFERED_ANSWER_TOKENS)), "answer tokens"),
            ),
            "Including rejected requests; answer lengths are estimated from recent ones.",
            width=6,
        ),
    ),
)

_HOSTS = Row(
    "Processes",
    (
        Panel(
            "CPU",
            Unit.NUMBER,
            (Query(rate(_process("process_cpu_seconds_total"), "worker"), "{{worker}}"),),
            "Cores in use.",
        ),
        Panel(
            "Memory",
            Unit.BYTES,
            (Query(total(_process("process_resident_memory_bytes"), "worker"), "{{worker}}"),),
            "Resident, shared pages included.",
        ),
        Panel(
            "Open files",
            Unit.NUMBER,
            (Query(total(_process("process_open_fds"), "worker"), "{{worker}}"),),
        ),
    ),
)


def _gpu(title: str, unit: Unit, metric: str, about: str = "") -> Panel:
    return Panel(title, unit, (Query(metric, "{{Hostname}} GPU {{gpu}}"),), about, width=6)


_HARDWARE = Row(
    "Hardware (NVIDIA's dcgm-exporter)",
    (
        _gpu("Tensor cores busy", Unit.SHARE, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "Compare with the arithmetic used."),
        _gpu(
            "Memory controller busy", Unit.SHARE, "DCGM_FI_PROF_DRAM_ACTIVE", "Compare with the memory bandwidth used."
        ),
        _gpu("GPU memory in use", Unit.BYTES, "DCGM_FI_DEV_FB_USED * 1048576"),
        Panel(
            "NVLink",
            Unit.BYTES_A_SECOND,
            (
                Query("DCGM_FI_PROF_NVLINK_TX_BYTES", "{{Hostname}} GPU {{gpu}} sent"),
                Query("DCGM_FI_PROF_NVLINK_RX_BYTES", "{{Hostname}} GPU {{gpu}} received"),
            ),
            width=6,
        ),
        _gpu("Clock", Unit.HERTZ, "DCGM_FI_DEV_SM_CLOCK * 1000000", "A clock that falls under load is heat or power."),
        _gpu("Power", Unit.WATTS, "DCGM_FI_DEV_POWER_USAGE"),
        _gpu("Temperature", Unit.CELSIUS, "DCGM_FI_DEV_GPU_TEMP"),
        _gpu("Last Xid error", Unit.NUMBER, "DCGM_FI_DEV_XID_ERRORS", "NVIDIA's number (Xid); 0: none."),
    ),
    folded=True,
)

DASHBOARD = Dashboard(
    "workers",
    "Tandem: workers, KV and hardware",
    "Workers, KV pages and hardware",
    (_PROCESSES, _PLANNER, _ENGINE, _SPECULATION, _KV, _TIERS, _HOSTS, _HARDWARE),
)
