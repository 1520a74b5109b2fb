"""Defines all metrics of Tandem, in the order of a request: router, prefill, transfer, decode, and the cluster.

Names and suffixes follow vLLM's, so that dashboards and autoscalers for other servers need only a rename.
docs/operations/metrics.md describes how to read each metric.
"""

from tandem.metrics.family import Family, counter, gauge, histogram

_TTFT_S = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0,
    120.0,
)  # fmt: skip
_ITL_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06,
    0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
"""Upper bounds of the ITL histograms in seconds, from 0.5 ms, because the ITL of fast clusters is below 10 ms."""
_PHASE_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_REQUEST_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0)
_STEP_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0,
    5.0,
)  # fmt: skip
_TRANSFER_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_BYTES_PER_S = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 5e9, 1e10, 2e10, 3e10, 5e10, 1e11, 2e11, 4e11)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
_OVER_PREDICTED = (0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 2.0, 3.0, 5.0)
_ERRORS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)

# Router

TIME_TO_FIRST_TOKEN = histogram(
    "time_to_first_token_seconds", "Time from a request's arrival until its first token leaves the router.", _TTFT_S
)
INTER_TOKEN_LATENCY = histogram(
    "inter_token_latency_seconds",
    "Time between a token and the previous one, as they leave the router; 0 for tokens that leave together.",
    _ITL_S,
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "request_time_per_output_token_seconds", "Mean gap between a finished request's tokens.", _ITL_S
)
E2E_REQUEST_LATENCY = histogram(
    "e2e_request_latency_seconds", "Time from arrival to the end of a complete answer.", _REQUEST_S
)
# The phases of a request, equal to its spans: those of one request add up to its latency.
QUEUE_TIME = histogram(
    "request_queue_time_seconds",
    "Time from arrival to the first chunk: in the router's queue and in the prefill worker's queue.",
    _PHASE_S,
)
PREFILL_TIME = histogram(
    "request_prefill_time_seconds", "Time from the start of a prompt's first chunk to the end of its last.", _PHASE_S
)
TRANSFER_TIME = histogram(
    "request_transfer_time_seconds",
    "Time of a KV hand-over that delays the answer: from the end of prefill to the decode worker's first step.",
    _PHASE_S,
)
DECODE_TIME = histogram(
    "request_decode_time_seconds", "Time from the first decode step to the end of the answer.", _REQUEST_S
)
STALL_TIME = histogram(
    "request_stall_time_seconds",
    "Time that requests lost on workers that stopped responding, until the router retried them elsewhere.",
    _PHASE_S,
)
TURN_GAP = histogram(
    "turn_gap_seconds",
    "Time between the arrival of a prompt and that of its next turn, a prompt that begins with all its full pages.",
    (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 16384.0, 65536.0),
)
REQUEST_SUCCESS = counter("request_success_total", "Completed answers, by finish reason.", "finished_reason")
REQUEST_FAILURES = counter(
    "request_failures_total", "Admitted requests that ended with an error, by error code.", "code"
)
REQUEST_RETRIES = counter("request_retries_total", "Failed attempts that were retried; the client does not see them.")
STALE_EVENTS = counter(
    "stale_events_total",
    "Messages of workers about attempts that were over, dropped: their request had moved to another worker, or ended.",
)
DEGRADED = gauge(
    "degraded", "1 = requests wait for a worker that is being started, because no other has its role; 0 = they do not."
)
PROMPT_TOKENS = counter("prompt_tokens_total", "Prompt tokens of completed answers.")
CACHED_PROMPT_TOKENS = counter(
    "cached_prompt_tokens_total",
    "Prompt tokens of completed answers whose KV was cached, so that they were not computed.",
)
GENERATION_TOKENS = counter("generation_tokens_total", "Generated tokens that left the router.")
ADMISSION_REJECTIONS = counter("admission_rejections_total", "Requests rejected before admission, by reason.", "reason")
AUDIT_RECORDS = counter("audit_records_total", "Calls of clients written to the audit log.")
AUDIT_RECORDS_LOST = counter(
    "audit_records_lost_total", "Calls that are missing in the audit log, because its disk was full or too slow."
)
TLS_CERTIFICATE_EXPIRES = gauge(
    "tls_certificate_expires_timestamp_seconds", "End of the certificate of the ports for clients, in Unix time."
)
OFFERED_REQUESTS = counter(
    "offered_requests_total",
    "Valid requests that arrived, including those rejected for lack of capacity.",
)
OFFERED_PROMPT_TOKENS = counter("offered_prompt_tokens_total", "Prompt tokens of the offered requests.")
OFFERED_ANSWER_TOKENS = counter(
    "offered_answer_tokens_total",
    "Expected answer tokens of the offered requests, from recent answers with a similar limit.",
)
SLO_REQUESTS = counter(
    "slo_requests_total",
    "Requests by class and outcome (met, missed_ttft, missed_itl, rejected, failed); goodput is the rate of met.",
    "slo_class",
    "outcome",
)
SLO_MISSED = counter(
    "slo_missed_total", "Requests that missed their service class, by the phase that caused it.", "slo_class", "phase"
)
GOODPUT = gauge(
    "goodput_requests_per_second",
    "Requests per second that met their service class, over the router's sliding window.",
    "slo_class",
)
PLACEMENTS = counter("placements_total", "Placements whose outcome was compared with the prediction.")
PLACED_TOKENS = counter(
    "placement_prompt_tokens_total",
    "Prompt tokens of these placements, by the source of their KV (resident, reloaded, computed).",
    "source",
)
PREDICTED = counter(
    "placement_predicted_seconds_total", "Sum of predicted seconds, by quantity (ttft, itl).", "quantity"
)
ACTUAL = counter("placement_actual_seconds_total", "Sum of observed seconds, by quantity (ttft, itl).", "quantity")
PREDICTION_ERROR = histogram(
    "placement_error_ratio", "|predicted - actual| / actual, by quantity (ttft, itl).", _ERRORS, "quantity"
)
REGRET = counter(
    "placement_regret_seconds_total",
    "Sum of seconds by which placements turned out worse than the predicted cost of the second choice.",
)


# Router and workers

REQUESTS_RUNNING = gauge(
    "num_requests_running", "Requests assigned to workers (role router), or in the running decode batch (workers)."
)
REQUESTS_WAITING = gauge(
    "num_requests_waiting", "Requests in the queue (role router), or prompts that are not fully computed (workers)."
)

# Workers: steps

STEP_SECONDS = histogram(
    "engine_step_seconds",
    "Duration of an engine step by kind (prefill, decode, mixed); between consecutive steps, from result to result.",
    _STEP_S,
    "phase",
)
STEP_DECODE_ROWS = histogram(
    "engine_step_decode_requests", "Decoding requests in a step, over steps that have any.", _ROWS
)
STEP_PREFILL_TOKENS = histogram(
    "engine_step_prefill_tokens", "Prompt tokens in a step, over steps that have any.", _TOKENS
)
STEP_TOKENS = counter(
    "engine_step_tokens_total", "Tokens computed by engine steps, by phase (prefill, decode).", "phase"
)
STEP_BUSY = counter(
    "engine_busy_seconds_total", "Seconds that the engine spent in steps; the rest of its time is idle."
)
STEP_BYTES = counter(
    "engine_memory_bytes_total", "Bytes of weights and KV that steps had to read, derived from their shapes."
)
STEP_FLOPS = counter("engine_flops_total", "Floating-point operations that steps had to do, derived from their shapes.")
STEP_ENERGY = counter(
    "engine_energy_joules_total",
    "Joules that the worker's GPUs used, idle time included; absent on CPUs and on GPUs without a counter.",
)
STEP_COLLECTIVES = counter(
    "engine_collective_seconds_total",
    "Predicted seconds of steps in which the worker's GPUs exchange sums, embeddings and logits; absent with one GPU.",
)
BANDWIDTH_UTILIZATION = gauge(
    "model_bandwidth_utilization_ratio",
    "Bytes per second that steps had to read / the device's memory bandwidth, over the last seconds with steps.",
)
FLOPS_UTILIZATION = gauge(
    "model_flops_utilization_ratio",
    "Floating-point operations per second / the device's peak, over the last seconds with steps.",
)
DEVICE_BANDWIDTH = gauge(
    "device_memory_bytes_per_second", "Memory bandwidth of the device, the denominator of its utilization."
)
DEVICE_FLOPS = gauge(
    "device_flops_per_second",
    "Peak floating-point operations per second of the device, the denominator of its utilization.",
)
BATCH_LIMIT = gauge("engine_batch_limit_requests", "Maximum number of requests in a decode batch.")
GRAPH_STEPS = counter(
    "engine_graph_steps_total", "Engine steps with a CUDA graph (hit) or without one (miss).", "graph"
)
GRAPH_PADDED_TOKENS = counter("engine_graph_padded_tokens_total", "Padding tokens that CUDA graphs computed.")
EXPERT_TOKENS = counter(
    "engine_expert_tokens_total",
    "Tokens that chose an expert, by its number and by third of the layers (first, middle, last).",
    "layer_group",
    "expert",
)
STEP_COST_ERROR = gauge("engine_step_cost_error_ratio", "Recent mean of |predicted - actual| / actual of steps.")
STEP_OVER_PREDICTED = histogram(
    "engine_step_over_predicted_ratio",
    "Observed / predicted duration of an engine step, by kind (prefill, decode, mixed).",
    _OVER_PREDICTED,
    "phase",
)
STEP_MIXED_NOISE = gauge(
    "engine_mixed_step_margin_ratio",
    "99th percentile of observed / predicted duration of mixed steps: they are planned shorter than gap"
    " targets by this factor.",
)
STEP_COST = gauge(
    "engine_step_cost_seconds",
    "Fitted step cost by part: base of each step, prompt_base of steps with prompts, verify_base of steps with drafts,"
    " and the cost that each token, pair, row and context token adds.",
    "part",
)
STEP_FREE_TOKENS = gauge(
    "engine_step_free_tokens", "Tokens of a step whose arithmetic is hidden behind reading the weights."
)
DRAFTED = counter(
    "speculation_draft_tokens_total", "Drafts that steps verified, by position in the draft, from 0.", "position"
)
DRAFTS_ACCEPTED = counter(
    "speculation_accepted_tokens_total", "Verified drafts that became tokens of answers, by position.", "position"
)
DRAFTED_BY_SOURCE = counter(
    "speculation_source_draft_tokens_total",
    "Verified drafts by proposer and by the length of the match that they rest on (8 = 8 or more, 0 = no match).",
    "proposer",
    "match",
)
ACCEPTED_BY_SOURCE = counter(
    "speculation_source_accepted_tokens_total",
    "Verified drafts that became tokens of answers, by proposer and match.",
    "proposer",
    "match",
)
SPECULATION_SAVED = counter(
    "speculation_saved_seconds_total",
    "Predicted seconds that steps without drafts would have taken longer for the same tokens of a request.",
)
SPECULATION_LOST = counter(
    "speculation_lost_seconds_total",
    "Predicted seconds that steps without drafts would have been shorter, where too few drafts were accepted.",
)
SPECULATION_DRAFTING = counter(
    "speculation_drafting_seconds_total", "Seconds that a draft model, or heads, took to propose drafts."
)
SPECULATION_MODEL_BYTES = gauge(
    "speculation_model_bytes",
    "Memory of what proposes drafts: weights, and KV pages of a draft model, EAGLE head or MTP layer.",
    "kind",
)
SPECULATION_SPEEDUP = gauge(
    "speculation_speedup_ratio",
    "Tokens per second of recent decode steps / those that steps without drafts would have given.",
)
PREEMPTIONS = counter(
    "num_preemptions_total", "Running requests that were preempted: their KV pages went to older requests."
)

# Workers: KV

KV_USAGE = gauge(
    "kv_cache_usage_ratio",
    "Share of the KV pages in use or reserved: of all pages, or of those for answers, if larger; cached ones are free.",
)
KV_PAGES = gauge(
    "kv_pages",
    "KV pages by state: free, owned, shared, cached, advertised, quarantined; reserved ones are among free and cached.",
    "state",
)
KV_REFUSALS = counter(
    "kv_cache_refusals_total",
    "Requests that were sent back to their router's queue because no KV pages could be reserved.",
)
PREFIX_QUERIES = counter("prefix_cache_queries_tokens_total", "Prompt tokens looked up in the prefix cache.")
PREFIX_HITS = counter("prefix_cache_hits_tokens_total", "Prompt tokens that were found in the prefix cache.")
PREFIX_EVENTS = counter(
    "prefix_cache_pages_total", "Pages added to (stored) or evicted from (removed) the prefix cache.", "event"
)

# Workers: tiers of the prefix cache (--kv-host-gib, --kv-disk-gib), and "peer", the pulls from other workers

TIER_PAGES = counter(
    "kv_tier_pages_total",
    "KV pages that a tier of the prefix cache has stored, loaded (hits), evicted, or found corrupt; peer: were pulled.",
    "tier",
    "event",
)
TIER_BYTES = counter("kv_tier_bytes_total", "Bytes of the KV pages that a tier has stored and loaded.", "tier", "event")
TIER_SECONDS = counter(
    "kv_tier_seconds_total", "Seconds of storing and loading KV pages, with copies and checksums.", "tier", "event"
)
TIER_FAILURES = counter(
    "kv_tier_failures_total", "Reads, writes and pulls of KV pages that failed, for example as a disk is full.", "tier"
)
TIER_USED = gauge("kv_tier_used_bytes", "Bytes of the KV pages in a tier.", "tier")
TIER_CAPACITY = gauge("kv_tier_capacity_bytes", "Bytes of the KV pages that a tier may have.", "tier")

# Workers: transfers

TRANSFER_SECONDS = histogram(
    "kv_transfer_seconds",
    "Seconds of KV writes of one hand-over, without the chunks computed between them; at the prefill worker.",
    _TRANSFER_S,
)
TRANSFER_WRITING = counter(
    "kv_transfer_writing_seconds_total",
    "Seconds with writes in progress, summed over hand-overs; its rate is the number of concurrent hand-overs.",
)
TRANSFER_BYTES = counter("kv_transfer_bytes_total", "Bytes of KV handed over, at the prefill worker.")
TRANSFER_FAILURES = counter("kv_transfer_failures_total", "Failed hand-overs, at the prefill worker.")
TRANSFER_BANDWIDTH = histogram(
    "kv_transfer_bandwidth_bytes_per_second", "Bytes of one hand-over / seconds of its writes.", _BYTES_PER_S
)
EXPIRED_LEASES = counter(
    "kv_transfer_expired_leases_total", "Leases that expired without a heartbeat, at the decode worker."
)
OPEN_LEASES = gauge("kv_transfer_open_leases", "Open leases, including quarantined ones.")
PENDING_TRANSFER_PAGES = gauge(
    "kv_transfer_pending_pages", "KV pages of ended prompts that unfinished writes still read, at the prefill worker."
)
CHECKSUM_FAILURES = counter(
    "kv_transfer_checksum_failures_total", "Hand-overs rejected because the checksum of a page did not match."
)
FENCED = counter(
    "kv_transfer_fenced_total", "Messages and notifications dropped because their lease or attempt had ended."
)
TRANSPORT = gauge("kv_transport_info", "1; how KV pages are transferred: back end and transports.", "transport")
TRANSPORT_WARNINGS = gauge(
    "kv_transport_warnings", "Number of warnings about the transport, for example TCP between GPUs."
)

# Workers: info and health

WORKER_INFO = gauge(
    "worker_info",
    "1; the worker's present role, what it computes on, and its weights' type; to be joined by `worker`.",
    "role",
    "device",
    "dtype",
)
WORKER_RANKS = gauge(
    "worker_ranks",
    "Number of the worker's ranks: GPUs, or processes on CPUs, among which its model or its prompts are divided.",
)
MODEL_INFO = gauge(
    "model_info", "1; the worker's model: parameters, KV cache, attention and experts, as text.", "summary"
)
WORKER_READY = gauge("worker_ready", "1 = it takes new requests.")
POOL_SOUND = gauge("kv_pool_consistent", "1 = the page pool's integrity checks pass.")

# Controller

PROCESS_UP = gauge(
    "process_up", "1 = the process serves; workers are labelled with their current role.", "role", "worker"
)
PROCESS_RESTARTS = counter("process_restarts_total", "Restarts of the process.", "worker")
TARGET_UP = gauge("metrics_target_up", "1 = the process responded to the latest scrape of the cluster.", "worker")

# Planner

PLANNER_LOAD_RATIO = gauge(
    "planner_load_ratio",
    "Predicted load / capacity of each role: at 1 the service classes can just be met.",
    "role",
)
PLANNER_WANTED = gauge(
    "planner_wanted_workers", "Workers that the planner asks for, by role, whether or not it may act.", "role"
)
PLANNER_CHANGES = counter(
    "planner_changes_total",
    "Changes by the planner, or proposed in a dry run (to_prefill, to_decode, up, down).",
    "direction",
)

FAMILIES: tuple[Family, ...] = tuple(family for family in list(vars().values()) if isinstance(family, Family))
"""All families, in the order of this module."""
