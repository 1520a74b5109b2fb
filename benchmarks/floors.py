"""The floors of figures, by benchmark, hardware and shape. `python -m benchmarks.tables` checks runs against them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import RESULTS, Run, read_results


@dataclass(frozen=True, slots=True)
class Floor:
    """A bound of a figure: a lower bound or, with `at_most`, an upper bound.

    It is `limit` or, if `plus` is set, `limit` plus the run's figure of that name.
    """

    limit: float
    at_most: bool = False
    plus: str = ""

    def missed(self, value: object, run: Run) -> bool:
        """Return True if `value` is a number and violates the bound; `run` supplies the figure `plus`."""
        if not isinstance(value, int | float):
            return False
        limit = self.limit + (run[self.plus] if self.plus else 0)
        return value > limit if self.at_most else value < limit

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.limit:g}" + (f" + `{self.plus}`" if self.plus else "")


Floors = Mapping[str, Floor]

_ENGINE: dict[str, Floors] = {
    "llama-3-8b": {
        "start_seconds": Floor(40, at_most=True),
        "decode_bw_ratio_b1": Floor(0.85),
        "decode_bw_ratio_b32": Floor(0.82),
        "decode_bw_ratio_b128": Floor(0.80),
        "decode_bw_ratio_b256": Floor(0.72),
        "prefill_flops_ratio_1x2048": Floor(0.96),
        "prefill_flops_ratio_1x8192": Floor(0.96),
        "prefill_flops_ratio_8x2048": Floor(0.96),
        "attention_bw_ratio_64x2048": Floor(0.90),
        "attention_bw_ratio_128x4096": Floor(0.92),
        "attention_bw_ratio_1x32768": Floor(0.75),
    },
    "llama-3.2-1b": {
        "decode_bw_ratio_b1": Floor(0.65),
        "decode_bw_ratio_b128": Floor(0.68),
        "prefill_flops_ratio_1x2048": Floor(0.75),
    },
    "qwen3-0.6b": {
        "decode_bw_ratio_b1": Floor(0.40),
        "decode_bw_ratio_b32": Floor(0.58),
        "decode_idle_share_b32": Floor(0.03, at_most=True),
    },
    "qwen3-30b-a3b": {
        "decode_bw_ratio_b1": Floor(0.50),
        "decode_bw_ratio_b8": Floor(0.75),
        "decode_bw_ratio_b32": Floor(0.82),
        "decode_bw_ratio_b128": Floor(0.80),
        "decode_bw_ratio_b256": Floor(0.72),
        "prefill_flops_ratio_1x2048": Floor(0.50),
        "prefill_flops_ratio_1x8192": Floor(0.68),
    },
    "deepseek-v2-lite": {
        "decode_bw_ratio_b1": Floor(0.45),
        "decode_bw_ratio_b32": Floor(0.78),
        "decode_bw_ratio_128x4096": Floor(0.72),
    },
}
"""Floors for one H100 or H200 with bfloat16, by shape."""
_TIMES_16_BITS = {
    "_kv-int8": (0.99, 1.08, 1.22, 1.29),
    "_int8": (1.61, 1.35, 1.03, 0.97),
    "_fp8": (1.61, 1.35, 1.13, 1.10),
    "_int4": (2.23, 1.57, 1.00, 0.97),
    "_fp8_kv-int8": (1.61, 1.52, 1.52, 1.53),
    "_int4_kv-int8": (2.23, 1.82, 1.27, 1.29),
}
"""Minimum speedup of llama-3-8b decode steps over 16 bits, by scheme, for 1, 32, 128 and 256 rows."""
_PREFILL_TIMES_16_BITS: Mapping[str, Mapping[str, float]] = {
    "_kv-int8": {"1x2048": 0.97, "1x8192": 0.97, "8x2048": 0.97},
    "_fp8": {"1x2048": 1.40, "1x8192": 1.35, "8x2048": 1.45},
    "_int4": {"1x512": 0.75, "1x2048": 0.88, "1x8192": 0.95},
}
_KV_8_BIT: Floors = {"attention_bw_ratio_64x2048_int8": Floor(0.85)}
_ENGINE |= {
    f"llama-3-8b{scheme}": {
        **{
            f"decode_over_before_b{batch}": Floor(least) for batch, least in zip((1, 32, 128, 256), ratios, strict=True)
        },
        **{
            f"prefill_over_before_{size}": Floor(least)
            for size, least in _PREFILL_TIMES_16_BITS.get(scheme, {}).items()
        },
        **(_KV_8_BIT if scheme == "_kv-int8" else {}),
    }
    for scheme, ratios in _TIMES_16_BITS.items()
}
_STEPS = Floor(1.03, at_most=True)
"""Maximum duration of a step during transfers ÷ that of a step without them."""
_KV_TWO_GPUS: Floors = {
    "transfer_bw_ratio_one_page": Floor(0.60),
    "transfer_bw_ratio_2048": Floor(0.90),
    "transfer_bw_ratio_4096": Floor(0.90),
    "transfer_bw_ratio_8192": Floor(0.90),
    "exposed_share_8192": Floor(0.02, at_most=True),
    "handover_ms_8192": Floor(2, at_most=True, plus="decode_step_ms"),
    "prefill_with_over_without_transfer": _STEPS,
    "decode_step_with_over_without_transfers": _STEPS,
    "decode_step_meeting_transfers_over_quiet": _STEPS,
}
"""Floors of transfers between two GPUs in which the prefill worker writes the KV pages, as by default."""
_KV_CPU: Floors = {"exposed_of_prefill_1536": Floor(0.10, at_most=True)}
_SERVING: Floors = {"cluster_decode_ratio_b64": Floor(0.95)}
"""Floor of the decode speed through a cluster ÷ the decode speed of the engine alone, on GPUs."""
_LATENT: Floors = {"latent_bw_ratio_64x4096_h16": Floor(0.75), "latent_bw_ratio_1x32768_h16": Floor(0.45)}
_WEIGHTS: Floors = {"load_gb_per_s": Floor(2)}


def check(folder: Path = RESULTS) -> int:
    """Print one line per run that has floors, and return 1 if a run misses a floor, else 0."""
    judged = list(_judge(folder))
    print("\n".join(line for _, line in judged))
    return int(not all(held for held, _ in judged))


def _judge(folder: Path) -> Iterator[tuple[bool, str]]:
    """Yield True if a run meets its floors, else False, with a line of text about it.

    The runs are the newest of each benchmark, model and hardware.
    """
    newest: dict[tuple[str, ...], tuple[str, Run]] = {}
    for name, run in read_results(folder):
        benchmark, model = name.split("-", 1)[0], str(run.get("shape") or run.get("model"))
        if floors_of(benchmark, run):
            newest[benchmark, model, run["hardware"]["name"], str(run.get("gpus", ""))] = name, run
    for (benchmark, *_), (name, run) in sorted(newest.items()):
        faults = list(_faults(floors_of(benchmark, run), run))
        yield (
            not faults,
            f"{'missed' if faults else 'held  '}  {name}" + "".join(f"\n        {fault}" for fault in faults),
        )


def _faults(floors: Floors, run: Run) -> Iterator[str]:
    for name, floor in floors.items():
        if name not in run:
            yield f"{name} is not in it, its floor is {floor}"
        elif floor.missed(run[name], run):
            yield f"{name} is {run[name]:.3f}, its floor is {floor}"


def floors_of(benchmark: str, run: Run) -> Floors:
    """Return a run's floors; empty if none are set for its benchmark, its shape or its number of GPUs.

    Runs of two workers on one GPU have none, because the workers wait for each other.
    """
    if benchmark == "engine":
        return _ENGINE.get(str(run.get("shape")), {})
    if benchmark == "kv":
        return {0: _KV_CPU, 2: _KV_TWO_GPUS}.get(run.get("gpus", 1), {})
    if benchmark == "serving" and "cluster_decode_ratio_b64" in run:
        return _SERVING
    return {"latent": _LATENT, "weights": _WEIGHTS}.get(benchmark, {})
