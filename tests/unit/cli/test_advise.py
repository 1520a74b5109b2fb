"""`tandem advise`: the wall behind a symptom, and techniques with predicted gains and traps."""

import re
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.capacity.plan.advice import SYMPTOM_OF, Adviser, Symptom
from tandem.capacity.plan.worker_kind import WorkerKind
from tandem.capacity.planner.demand import Demand
from tandem.cli.main import app
from tandem.cost_model.devices import DEVICES
from tandem.cost_model.step_cost import StepCost
from tandem.engine.models.shapes import shape_config
from tandem.metrics.bottlenecks import Bottleneck, Diagnosis
from tandem.protocol.errors import InvalidArgument

LOAD = Demand(10.0, 2000.0, 500.0)


def kind(shape: str = "llama-3-8b", device: str = "H200") -> WorkerKind:
    return WorkerKind(shape, shape_config(shape), DEVICES[device])


def run(*options: str) -> Any:
    return CliRunner().invoke(app, ["advise", *options])


def gain(symptom: Symptom, option: str, batch: int = 32) -> float:
    (technique,) = [each for each in Adviser(kind(), LOAD, batch).advice(symptom).techniques if option in each.name]
    found = re.search(r"([\d.]+) times", technique.gain)
    assert found is not None
    return float(found[1])


def test_each_symptom_has_a_wall_and_techniques_with_gain_and_trap() -> None:
    for symptom in Symptom:
        result = run(symptom)
        assert result.exit_code == 0, result.output
        steps = re.findall(r"^\d+\. (.+)\n   gain   (.+)\n   trap   (.+)$", result.stdout, re.MULTILINE)
        assert len(steps) >= 3
        assert len({name for name, _, _ in steps}) == len(steps)
        assert result.stdout.startswith("wall      ")


def test_the_walls_are_those_of_the_cost_model() -> None:
    adviser = Adviser(kind(), LOAD, 32)
    prompt_s = LOAD.lone_prompt_seconds(StepCost(kind().costs), 2048)
    assert f"takes {1e3 * prompt_s:.0f} ms alone" in adviser.advice(Symptom.FIRST_TOKEN).wall
    assert adviser.advice(Symptom.FIRST_TOKEN).wall.startswith("compute: ")
    short = Adviser(kind(), Demand(10.0, 20.0, 500.0), 32)
    assert short.advice(Symptom.FIRST_TOKEN).wall.startswith("memory bandwidth: ")
    step_s = StepCost(kind().costs).decode_step_seconds(32, 32 * 2250)
    wall = adviser.advice(Symptom.STREAM).wall
    assert f"takes {1e3 * step_s:.1f} ms" in wall
    assert wall.endswith("the weights are the larger part")
    assert Adviser(kind(), LOAD, 128).advice(Symptom.STREAM).wall.endswith("the KV is the larger part")


def test_gains_depend_on_what_is_slow() -> None:
    """4-bit weights shorten decode steps of few requests and no prompts; FP8 shortens both."""
    assert gain(Symptom.STREAM, "int4", batch=1) > gain(Symptom.STREAM, "fp8", batch=1) > 1.4
    assert gain(Symptom.FIRST_TOKEN, "fp8") > 1.4
    names = [technique.name for technique in Adviser(kind(), LOAD, 32).advice(Symptom.FIRST_TOKEN).techniques]
    assert not any("int4" in name or "kv-cache" in name for name in names)
    assert gain(Symptom.STREAM, "kv-cache", batch=128) > gain(Symptom.STREAM, "kv-cache", batch=32)
    assert gain(Symptom.STREAM, "speculate", batch=256) == 1.0 < gain(Symptom.STREAM, "speculate", batch=1)


def test_what_makes_a_large_model_fit() -> None:
    result = run("does not fit", "--shape", "llama-3-70b", "--gpu", "H100")
    assert result.exit_code == 0
    assert "0 tokens of KV remain" in result.stdout
    assert re.search(r"--tensor-parallel-size 4\n   gain   3\d\.\d GiB of weights on each GPU", result.stdout)


@pytest.mark.parametrize(
    ("text", "symptom"),
    [("TTFT", Symptom.FIRST_TOKEN), ("the stream is slow", Symptom.STREAM), ("RAG", Symptom.RAG)],
)
def test_symptoms_in_other_words(text: str, symptom: Symptom) -> None:
    assert Symptom.parse(text) is symptom


def test_unknown_symptoms_are_refused_with_the_known_ones() -> None:
    for text in ("slow", "hot", "first stream"):
        with pytest.raises(InvalidArgument, match='is not one of "first token slow", "stream slow", "does not fit"'):
            Symptom.parse(text)
    for options in ((), ("bill", "--live")):
        refused = run(*options)
        assert refused.exit_code == 2
        assert refused.stderr.startswith("error: SYMPTOM: is needed, or --live")


def test_live_advice_is_for_the_bottlenecks_of_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        ("decode-0", Diagnosis(Bottleneck.BANDWIDTH, "it reads", "larger batches")),
        ("decode-1", Diagnosis(Bottleneck.BANDWIDTH, "it reads, too", "larger batches")),
        ("prefill-0", Diagnosis(Bottleneck.TRANSFER, "it writes", "a faster transport")),
    ]
    monkeypatch.setattr("tandem.cli.observe.why.scraped_interval", lambda _seconds: None)
    monkeypatch.setattr("tandem.cli.observe.why.diagnoses", lambda _interval: found)
    result = run("--live")
    assert result.exit_code == 0
    assert "prefill-0: transfer: it writes; a faster transport" in result.stdout
    assert result.stdout.count("\nwall ") == 1
    assert "stream slow\nwall      memory bandwidth" in result.stdout
    assert set(SYMPTOM_OF) < set(Bottleneck)
