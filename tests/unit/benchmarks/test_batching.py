"""Static, dynamic and continuous batching under the virtual clock."""

import math

import pytest

from benchmarks.batching import run_policy
from benchmarks.command_line import run_case
from tandem.capacity.simulation.hardware import Hardware, hardware
from tandem.capacity.simulation.prompt import VirtualPrompt
from tandem.capacity.simulation.request import LoadRequest
from tandem.settings.slo import BEST_EFFORT


@pytest.fixture(scope="module")
def machine() -> Hardware:
    return hardware("llama-3-8b", None, 100.0, 1.0)


def requests(*lengths: tuple[float, int]) -> list[LoadRequest]:
    """Requests of prompts of 100 tokens, each with its time and the tokens of its answer."""
    return [LoadRequest(due, VirtualPrompt(key, 100, ()), new, BEST_EFFORT) for key, (due, new) in enumerate(lengths)]


def test_a_static_batch_waits_until_it_is_complete_and_the_one_before_has_ended(machine: Hardware) -> None:
    load = requests((0.0, 10), (1.0, 200), (1.1, 10), (1.2, 10), (50.0, 10))
    row = run_policy("static", machine, load, 2, math.inf)
    assert row["padding"] == pytest.approx(1 - 240 / (2 * 200 + 2 * 10 + 10), abs=1e-4)
    wait_ms = row["ttft_ms"]
    assert isinstance(wait_ms, dict)
    assert wait_ms["99"] == pytest.approx(1000, rel=0.1), "the first waits for the second; the last for none"
    assert row["requests"] == 5
    assert not row["failed"]


def test_a_dynamic_batch_waits_no_longer_than_its_timeout(machine: Hardware) -> None:
    load = requests((0.0, 10), (1.0, 10), (2.0, 10))
    row = run_policy("dynamic", machine, load, 8, 0.2)
    ttft_ms = row["ttft_ms"]
    assert isinstance(ttft_ms, dict)
    assert 200 < ttft_ms["50"] <= ttft_ms["99"] < 220, "the last does not wait"
    assert row["padding"] == 0


def test_continuous_batching_computes_twice_as_many_tokens_a_second_under_load(machine: Hardware) -> None:
    load = requests(*((0.01 * number, 40 if number % 8 else 400) for number in range(96)))
    static, continuous = (run_policy(policy, machine, load, 8, math.inf) for policy in ("static", "continuous"))
    assert continuous["tokens_per_s"] > 2 * float(str(static["tokens_per_s"]))
    assert float(str(continuous["slots_filled"])) > 2 * float(str(static["slots_filled"]))
    assert continuous["padding"] == 0 < float(str(static["padding"]))


def test_the_command_prints_a_row_for_each_policy_and_rate(capsys: pytest.CaptureFixture[str]) -> None:
    run_case("batching", "", {"policies": "benchmarks.batching"}, ["--rates", "2", "--seconds", "3", "--slots", "4"])
    assert capsys.readouterr().out.count("'policy'") == 3
    with pytest.raises(SystemExit, match="--gpu: 'H900' is not one of"):
        run_case("batching", "", {"policies": "benchmarks.batching"}, ["--gpu", "H900"])
