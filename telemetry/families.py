"""Every metric of Tandem, in the order of a request: front door, prefill, transfer, decode, and the cluster around.

Names and suffixes are those of the field, so that dashboards and autoscalers made for other servers need one rename.
docs/operations.md says what to read from each.
"""

from telemetry.family import Family, counter, gauge, histogram

_TTFT_S = (
    0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0,
    120.0,
)  # fmt: skip
_ITL_S = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06,
    0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
"""From half a millisecond: tokens that follow each other faster than 10 ms are what a fast cluster is for."""
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
    "time_to_first_token_seconds", "From a request's arrival to its first token leaving the router.", _TTFT_S
)
INTER_TOKEN_LATENCY = histogram(
    "inter_token_latency_seconds",
    "Between a token and the one before it, as they leave the router; 0 for tokens that leave together.",
    _ITL_S,
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "request_time_per_output_token_seconds", "Mean gap between a finished request's tokens.", _ITL_S
)
E2E_REQUEST_LATENCY = histogram("e2e_request_latency_seconds", "From arrival to the end of a whole answer.", _REQUEST_S)
# The phases of a request, as its spans: those of one request add up to what it took.
QUEUE_TIME = histogram(
    "request_queue_time_seconds", "Until its first chunk, at the router and in the prefill worker's line.", _PHASE_S
)
PREFILL_TIME = histogram("request_prefill_time_seconds", "From a prompt's first chunk to its last one's end.", _PHASE_S)
TRANSFER_TIME = histogram(
    "request_transfer_time_seconds",
    "Of a hand-over: from the prompt's end to the decode worker's first step; what moves earlier costs nothing.",
    _PHASE_S,
)
DECODE_TIME = histogram("request_decode_time_seconds", "From there, or the prompt's end, to the end.", _REQUEST_S)
STALL_TIME = histogram(
    "request_stall_time_seconds", "Of requests whose workers fell silent: until the router gave them up.", _PHASE_S
)
REQUEST_SUCCESS = counter("request_success_total", "Answers that ended well, by reason.", "finished_reason")
REQUEST_FAILURES = counter("request_failures_total", "Admitted requests that ended with an error, by code.", "code")
REQUEST_RETRIES = counter(
    "request_retries_total", "Attempts that failed and were followed by another, which the client does not see."
)
PROMPT_TOKENS = counter("prompt_tokens_total", "Prompt tokens of answers that ended well.")
CACHED_PROMPT_TOKENS = counter(
    "cached_prompt_tokens_total", "Those of them that were not computed, as their KV was cached."
)
GENERATION_TOKENS = counter("generation_tokens_total", "Tokens that left the router.")
ADMISSION_REJECTIONS = counter("admission_rejections_total", "Requests turned away at the door, by reason.", "reason")
OFFERED_REQUESTS = counter(
    "offered_requests_total",
    "Answers that were asked for and could be given, those turned away for lack of room included.",
)
OFFERED_PROMPT_TOKENS = counter("offered_prompt_tokens_total", "Prompt tokens of these requests.")
OFFERED_ANSWER_TOKENS = counter(
    "offered_answer_tokens_total", "Tokens of these answers, as long as those that ended of late with such a limit."
)
SLO_REQUESTS = counter(
    "slo_requests_total",
    "Requests by service class and outcome (met, missed_ttft, missed_itl, shed, failed); goodput is the rate of met.",
    "slo_class",
    "outcome",
)
SLO_MISSED = counter(
    "slo_missed_total", "Requests that did not meet their class, by the phase that was to blame.", "slo_class", "phase"
)
GOODPUT = gauge(
    "goodput_requests_per_second", "Requests that met their class, over the router's sliding window.", "slo_class"
)
PLACEMENTS = counter("placements_total", "Placements whose outcome was compared with what was expected.")
PREDICTED = counter(
    "placement_predicted_seconds_total", "What placement expected, summed, by quantity (ttft, itl).", "quantity"
)
ACTUAL = counter("placement_actual_seconds_total", "What came instead, summed, by quantity (ttft, itl).", "quantity")
PREDICTION_ERROR = histogram(
    "placement_error_ratio", "|predicted - actual| / actual, by quantity (ttft, itl).", _ERRORS, "quantity"
)
REGRET = counter(
    "placement_regret_seconds_total",
    "By how much choices turned out worse than what the next best worker would have cost by prediction, summed.",
)

FRONT_CONNECTIONS = gauge(
    "front_connections", "Clients' connections that a front process holds, by its number.", "front"
)
FRONT_MESSAGES = counter(
    "front_messages_total",
    "Parts of requests and answers that went between a front process and the router; what leaves together is several.",
    "front",
)
FRONT_BYTES = counter("front_bytes_total", "What these took on the stream between the two.", "front")
FRONT_RESTARTS = counter(
    "front_restarts_total", "Front processes that ended or hung, and took their clients' connections along.", "front"
)

# Router and workers

REQUESTS_RUNNING = gauge(
    "num_requests_running", "Requests on workers (role router), or in the running decode batch (workers)."
)
REQUESTS_WAITING = gauge(
    "num_requests_waiting", "Requests in the queue (role router), or prompts not wholly computed (workers)."
)

# Workers: steps

STEP_SECONDS = histogram(
    "engine_step_seconds",
    "Of one engine step, by what was in it (prefill, decode, mixed); back to back, from result to result.",
    _STEP_S,
    "phase",
)
STEP_DECODE_ROWS = histogram("engine_step_decode_requests", "Requests that decode in a step, of steps with any.", _ROWS)
STEP_PREFILL_TOKENS = histogram("engine_step_prefill_tokens", "Prompt tokens of a step, of steps with any.", _TOKENS)
STEP_TOKENS = counter("engine_step_tokens_total", "Tokens computed in steps, by half (prefill, decode).", "half")
STEP_BUSY = counter("engine_busy_seconds_total", "Time that steps took; the rest of the engine's time is idle.")
STEP_BYTES = counter("engine_memory_bytes_total", "Bytes of weights and KV that steps had to read, by their shape.")
STEP_FLOPS = counter("engine_flops_total", "Floating-point operations that steps had to do, by their shape.")
BANDWIDTH_UTILIZATION = gauge(
    "model_bandwidth_utilization_ratio",
    "Bytes a second that steps had to read, as a part of the device's bandwidth; of the last seconds with steps.",
)
FLOPS_UTILIZATION = gauge(
    "model_flops_utilization_ratio",
    "Operations a second that steps had to do, as a part of the device's peak; of the last seconds with steps.",
)
DEVICE_BANDWIDTH = gauge("device_memory_bytes_per_second", "What bandwidth utilization is a part of.")
DEVICE_FLOPS = gauge("device_flops_per_second", "What utilization of operations is a part of.")
BATCH_LIMIT = gauge("engine_batch_limit_requests", "Most requests that decode in one step.")
GRAPH_STEPS = counter("engine_graph_steps_total", "Steps that a CUDA graph computed (hit), or none (miss).", "graph")
GRAPH_PADDED_TOKENS = counter("engine_graph_padded_tokens_total", "Tokens that CUDA graphs computed for nobody.")
STEP_COST_ERROR = gauge("engine_step_cost_error_ratio", "Recent mean of |predicted - actual| / actual of steps.")
STEP_OVER_PREDICTED = histogram(
    "engine_step_over_predicted_ratio",
    "What one engine step took / what was predicted, by what was in it (prefill, decode, mixed).",
    _OVER_PREDICTED,
    "phase",
)
STEP_MIXED_NOISE = gauge(
    "engine_mixed_step_noise_ratio",
    "A step of prompts beside answers / what was predicted, for all but one in a hundred: steps are kept so much"
    " shorter than what answers bear.",
)
STEP_COST = gauge(
    "engine_step_cost_seconds",
    "What steps were found to take, by part: base of each step, prompt_base of those with prompts, and what each token,"
    " pair, row and context token adds.",
    "part",
)
STEP_FREE_TOKENS = gauge(
    "engine_step_free_tokens", "Tokens of a step whose arithmetic is hidden by the reading of weights."
)
PREEMPTIONS = counter("num_preemptions_total", "Running requests that lost their KV pages to others.")

# Workers: KV

KV_USAGE = gauge("kv_cache_usage_ratio", "Part of the KV pages that are in use or promised; cached ones are not.")
KV_PAGES = gauge(
    "kv_pages",
    "KV pages by state: free, owned, shared, cached, advertised, quarantined; promised ones are free or cached.",
    "state",
)
KV_REFUSALS = counter(
    "kv_cache_refusals_total", "Requests sent back to wait at their router, as no KV pages could be promised to them."
)
PREFIX_QUERIES = counter("prefix_cache_queries_tokens_total", "Prompt tokens looked up in the prefix cache.")
PREFIX_HITS = counter("prefix_cache_hits_tokens_total", "Those of them whose KV was there.")
PREFIX_EVENTS = counter(
    "prefix_cache_pages_total", "Pages that became known (stored) or were taken (removed).", "event"
)

# Workers: transfers

TRANSFER_SECONDS = histogram(
    "kv_transfer_seconds",
    "Of one prompt's hand-over: all its writes together, without the chunks between them; of its prefill worker.",
    _TRANSFER_S,
)
TRANSFER_WRITING = counter(
    "kv_transfer_writing_seconds_total",
    "Time with writes under way, summed over hand-overs, as it passes; its rate is how many write at once.",
)
TRANSFER_BYTES = counter("kv_transfer_bytes_total", "Bytes of KV handed over; of the prefill worker.")
TRANSFER_FAILURES = counter("kv_transfer_failures_total", "Hand-overs that failed; of the prefill worker.")
TRANSFER_BANDWIDTH = histogram(
    "kv_transfer_bandwidth_bytes_per_second", "Bytes of one hand-over by the time of its writes.", _BYTES_PER_S
)
EXPIRED_LEASES = counter("kv_transfer_expired_leases_total", "Leases that had no heartbeat; of the decode worker.")
OPEN_LEASES = gauge("kv_transfer_open_leases", "Leases not yet settled, quarantined ones included.")
RESTLESS_PAGES = gauge(
    "kv_transfer_restless_pages", "KV pages of prompts that are over, which writes still read; of the prefill worker."
)
CHECKSUM_FAILURES = counter("kv_transfer_checksum_failures_total", "Hand-overs refused because a page had changed.")
FENCED = counter("kv_transfer_fenced_total", "Messages and notices dropped because their lease or attempt was over.")
TRANSPORT = gauge("kv_transport_info", "1; how KV pages move: back end, direction and kinds of wires.", "transport")
TRANSPORT_WARNINGS = gauge(
    "kv_transport_warnings", "What is slower or more fragile than it could be, a TCP wire for one."
)

# Workers: themselves

WORKER_INFO = gauge(
    "worker_info",
    "1; the worker's present role, what it computes on, and its weights' type; to be joined by `worker`.",
    "role",
    "device",
    "dtype",
)
WORKER_READY = gauge("worker_ready", "1 = it takes new requests.")
POOL_SOUND = gauge("kv_pool_sound", "1 = the page pool's own checks have found nothing wrong.")

# Controller

PROCESS_UP = gauge("process_up", "1 = the process serves; workers by their present role.", "role", "worker")
PROCESS_RESTARTS = counter("process_restarts_total", "How often the process was started again.", "worker")
TARGET_UP = gauge("metrics_target_up", "1 = the process answered this scrape of the whole cluster.", "worker")

# Planner

PLANNER_STRAIN = gauge(
    "planner_strain_ratio",
    "How near to its limit each half of the cluster is, by the planner's model: 1 = promises can just be kept.",
    "half",
)
PLANNER_WANTED = gauge(
    "planner_wanted_workers", "Workers that the planner wants, by role, whether or not it may act.", "half"
)
PLANNER_CHANGES = counter(
    "planner_changes_total",
    "Changes that it made, or would have made in a dry run (to_prefill, to_decode, up, down).",
    "direction",
)

FAMILIES: tuple[Family, ...] = tuple(each for each in list(vars().values()) if isinstance(each, Family))
"""All of them, in this order."""
