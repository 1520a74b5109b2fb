"""The strategy table's rows, and the continuation of an interrupted run."""

from pathlib import Path

import pytest

from benchmarks.cluster import ServedModel
from benchmarks.strategies.__main__ import main, parse_arguments, summary
from benchmarks.strategies.measured import CELLS, Run, Turn
from benchmarks.strategies.parts import Part, claim, joined
from benchmarks.strategies.rows import asks, chosen, strategies
from benchmarks.strategies.switch import settings_for_all
from benchmarks.strategies.workloads import offers
from benchmarks.sweep import GROWTH, STEPS_MAX
from tandem.protocol.errors import InvalidArgument
from tandem.settings.cluster import ClusterSettings
from tests.unit.benchmarks.strategies.test_strategy_table import load


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_row_is_a_cluster_of_equally_many_workers(workers: int) -> None:
    rows = strategies(workers)
    assert len({row.name for row in rows}) == len(rows) == 5 + workers
    for row in rows:
        config = ClusterSettings.of(Path("model"), **row.settings)
        assert config.worker_count == workers


def test_one_worker_has_no_disaggregated_row() -> None:
    kinds = {"shared", "chunked-512", "chunked-2048", "priority", "priority-50ms", "adaptive"}
    assert {row.kind for row in strategies(1)} == kinds
    with pytest.raises(InvalidArgument, match="less than 1"):
        strategies(0)


def test_rows_are_chosen_by_name_or_kind() -> None:
    names = [row.name for row in chosen(strategies(4), "shared,disaggregated")]
    assert names == ["shared", "disaggregated-1-3", "disaggregated-2-2", "disaggregated-3-1"]
    with pytest.raises(InvalidArgument, match="'fast' is not one of shared"):
        chosen(strategies(2), "fast")


def test_a_part_goes_on_where_it_was(tmp_path: Path) -> None:
    part = Part("shared", "balanced", tmp_path / "part.json")
    assert part.next_rate(2.0) == 2.0
    part.add(load(2.0, strict=1.0), {"commit": "abc"})
    assert part.fact("commit") == "abc"
    again = Part("shared", "balanced", tmp_path / "part.json")
    assert again.next_rate(2.0) == 2.0 * GROWTH
    again.add(load(3.0, strict=0.2, quick=0.95), {})
    assert again.next_rate(2.0) == pytest.approx(2.0 * GROWTH**2)
    again.add(load(4.5, strict=0.1, quick=0.5), {})
    assert again.next_rate(2.0) is None
    assert [row["rate"] for row in again.loads()] == [2.0, 3.0, 4.5]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["part.json"]


def arguments(tmp_path: Path, *more: str) -> Run:
    parsed = parse_arguments(["--parts", str(tmp_path), "--workloads", "balanced,decode-heavy", *more])
    return Run(parsed, ServedModel(Path("model"), "m", random_weights=True))


def measured_order(run: Run, most: int, share: float = 1.0) -> list[tuple[float, str, str]]:
    """Returns what a run measures, in order, if every load has this share of goodput; it ends after `most` loads."""
    order: list[tuple[float, str, str]] = []
    for turn in run.missing():
        if len(order) == most:
            break
        order.append((turn.rate, turn.offer.name, turn.row.name))
        turn.part.add(load(turn.rate, share, share), {})
    return order


def test_every_row_is_measured_at_a_rate_before_any_at_the_next(tmp_path: Path) -> None:
    run = arguments(tmp_path, "--rates", "3,1.5", "--only", "shared,adaptive")
    first = measured_order(run, 3)
    # Interrupted, and started again.
    rest = measured_order(arguments(tmp_path, "--rates", "3,1.5", "--only", "shared,adaptive"), 99)
    assert [*first, *rest] == [
        (rate, offer, row)
        for rate in (1.5, 3.0)
        for offer in ("balanced", "decode-heavy")
        for row in ("shared", "adaptive")
    ]
    assert not measured_order(arguments(tmp_path, "--rates", "1.5", "--only", "shared"), 99)
    again = measured_order(arguments(tmp_path, "--rates", "1.5,6", "--only", "shared", "--workloads", "balanced"), 99)
    assert again == [(6.0, "balanced", "shared")]


def test_a_sweep_goes_through_the_rows_at_each_rate_too(tmp_path: Path) -> None:
    run = arguments(tmp_path, "--workloads", "balanced", "--only", "shared,adaptive")
    assert measured_order(run, 4) == [(rate, "balanced", row) for rate in (2.0, 3.0) for row in ("shared", "adaptive")]
    lost = arguments(tmp_path / "other", "--workloads", "balanced", "--only", "shared,adaptive")
    lost.part(lost.rows[0], lost.offers[0]).file.parent.mkdir()
    assert len(measured_order(lost, 99, share=0.1)) == 2


def test_a_sweep_ends_with_its_trace(tmp_path: Path) -> None:
    """The sweep ends at the trace's end like the simulation; it once failed there, so the table was never printed."""
    trace = tmp_path / "short.jsonl"
    lines = [f'{{"timestamp": {1000 * n}, "input_length": 9, "output_length": 9, "hash_ids": [1]}}' for n in range(40)]
    trace.write_text("\n".join(lines))
    run = arguments(
        tmp_path, "--trace", str(trace), "--workloads", "short", "--only", "shared,adaptive", "--seconds", "10"
    )
    assert [rate for rate, _, _ in measured_order(run, 99)] == [1.0, 1.0, 1.5, 1.5, 2.25, 2.25, 3.375, 3.375]
    assert run.measure()


def test_a_cell_is_judged_by_the_load_that_asked_for_it() -> None:
    classes = {
        name: load(2.0, strict, quick) | {"errors": {}, "served_by": {name: 1}}
        for name, strict, quick in (("strict", 0.9, 0.1), ("balanced", 0.5, 0.5), ("quick", 0.2, 0.8))
    }
    for class_figures in classes.values():
        class_figures["goodput"]["balanced"] = {"share": 0.7, "per_s": 1.4}
    figures = joined(classes)
    assert {cell: score["share"] for cell, score in figures["goodput"].items()} == {
        "strict": 0.9,
        "balanced": 0.7,
        "quick": 0.8,
    }
    assert figures["served_by"] == {"balanced": 1}
    assert figures["asked"]["quick"]["served_by"] == {"quick": 1}
    assert joined({"": classes["strict"]}) == classes["strict"]
    assert figures["valid"]
    classes["quick"]["valid"] = False
    assert not joined(classes)["valid"]


def test_only_the_adaptive_row_sends_slo_classes_by_default() -> None:
    def asking(*more: str) -> list[str]:
        asked = parse_arguments(more).ask
        return [row.name for row in strategies(2) if asks(row, asked)]

    assert asking() == ["adaptive"]
    assert asking("--ask", "none") == []
    assert len(asking("--ask", "all")) == 6


def test_rows_share_arrivals_and_no_prompt(tmp_path: Path) -> None:
    run = arguments(tmp_path)
    seeds = [
        run._token_seed(Turn(row, offer, 1.0, run.part(row, offer)), number, place)
        for number in range(STEPS_MAX)
        for place in range(CELLS)
        for row in run.rows
        for offer in run.offers
    ]
    assert len(set(seeds)) == len(seeds)


def test_settings_of_all_rows_must_not_be_those_in_which_rows_differ() -> None:
    settings = settings_for_all({"page_tokens": 32}, "cuda", 3)
    assert ClusterSettings.of(Path("model"), **settings).worker_count == 3
    with pytest.raises(InvalidArgument, match="step_policy is what the rows differ in"):
        settings_for_all({"step_policy": "chunked"}, "cpu", 2)


def test_a_sweep_ends_some_time(tmp_path: Path) -> None:
    part = Part("shared", "balanced", tmp_path / "part.json")
    for _ in range(STEPS_MAX):
        rate = part.next_rate(1.0)
        assert rate is not None
        part.add(load(rate, strict=1.0), {})
    assert part.next_rate(1.0) is None


def test_workloads_are_scaled_and_slowed_down(tmp_path: Path) -> None:
    trace = tmp_path / "some_trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [1, 2]}\n')
    by_name = {offer.name: offer for offer in offers([trace], scale=0.1, slowdown=4.0)}
    assert list(by_name) == ["balanced", "decode-heavy", "doc-qa", "chat", "agents", "rag", "some-trace"]
    assert by_name["balanced"].first_rate == 0.25
    long = trace.rename(tmp_path / "mooncake_conversation.jsonl")
    assert offers([long], scale=0.1, slowdown=1.0)[-1].first_rate < 4 * by_name["some-trace"].first_rate
    workload = by_name["balanced"].source.at(50.0, 20.0, 0)
    mean = sum(arrival.prompt_tokens for arrival in workload.arrivals) / len(workload.arrivals)
    assert 160 < mean < 240


def test_the_strict_cell_comes_from_the_step_time_that_the_first_start_wrote(tmp_path: Path) -> None:
    assert arguments(tmp_path).unloaded_step_s is None
    (tmp_path / "unloaded_step.json").write_text("0.004")
    assert arguments(tmp_path).unloaded_step_s == 0.004


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--rates", "0"), "--rates: '0' has a rate that is not above 0"),
        (("--workloads", "azure"), "--workloads: 'azure' is not one of balanced, decode-heavy"),
        (("--slowdown", "0"), "--slowdown: 0 is not above 0"),
        (("--length-scale", "0"), "--length-scale: 0 is not above 0"),
        (("--seconds", "-1"), "no request is due within -1 s"),
        (("--clients", "0"), "--clients: 0 is less than 1"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_cluster_starts(
    tmp_path: Path, given: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        arguments(tmp_path, *given).measure()


def test_rows_without_a_common_rate_do_not_remove_the_other_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "--rates", "1,2", "--only", "shared,adaptive"
    run = arguments(tmp_path, *given)
    for offer, rates in zip(run.offers, ((1.0, 2.0), (1.0, 1.0)), strict=True):
        for row, rate in zip(run.rows, rates, strict=True):
            run.part(row, offer).add(load(rate, strict=1.0), {"dtype": "float32"})
    parsed = parse_arguments(["--parts", str(tmp_path), *given])
    assert list(summary(run, parsed)["tables"]) == ["decode-heavy"]  # type: ignore[call-overload]
    assert "balanced: no rate was measured in every row yet" in capsys.readouterr().out


def test_a_folder_has_loads_of_one_run(tmp_path: Path) -> None:
    """Loads of different runs are not mixed; a toy run's loads were once in the next run's table."""
    folder = tmp_path / "parts"
    toy: dict[str, object] = {"model": "small", "seconds": 5.0, "set": []}
    claim(folder, toy)
    claim(folder, toy)
    with pytest.raises(InvalidArgument, match=r"another run \(model small, not large; seconds 5\.0, not 60\.0\); name"):
        claim(folder, toy | {"model": "large", "seconds": 60.0})
    claim(tmp_path / "others", toy | {"model": "large"})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("balanced--shared.json", b'{"loads": [{"ra'),
        ("balanced--shared.json", b"{}"),
        ("balanced--shared.json", b'{"loads": [1]}'),
        ("balanced--shared.json", b"\xff"),
        ("unloaded_step.json", b""),
        ("unloaded_step.json", b"null"),
        ("run.json", b""),
        ("run.json", b"[]"),
    ],
)
def test_a_damaged_file_is_named_before_a_cluster_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    monkeypatch.setattr(
        "benchmarks.strategies.__main__.choose_model", lambda *_: ServedModel(tmp_path, "m", random_weights=True)
    )
    given = ["--parts", str(tmp_path), "--minutes", "0", "--rates", "1"]
    with pytest.raises(SystemExit, match=r"^3$"):
        main(given)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=f"{name} is damaged.*(it had is measured again|name another folder)$"):
        main(given)
    (tmp_path / name).unlink()
    with pytest.raises(SystemExit, match=r"^3$"):
        main(given)


def test_the_command_takes_no_other_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ServedModel(Path("model"), "m", random_weights=True)
    monkeypatch.setattr("benchmarks.strategies.__main__.choose_model", lambda *_: model)
    given = ["--parts", str(tmp_path), "--minutes", "0", "--rates", "1"]
    with pytest.raises(SystemExit, match=r"^3$"):
        main(given)
    with pytest.raises(SystemExit, match="seed 0, not 1"):
        main([*given, "--seed", "1"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--simulated", "--device", "cuda"], "--device: only without --simulated"),
        (["--gpu", "H100"], "--gpu: only with"),
    ],
)
def test_options_of_the_other_kind_of_table_are_refused(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(given)
    assert message in capsys.readouterr().err
