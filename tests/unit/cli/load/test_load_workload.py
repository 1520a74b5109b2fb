"""Sources of load: traces and random draws, prefixes, lengths, and rejected arguments."""

import itertools
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.trace import BLOCK_TOKENS, Trace, read_trace
from tandem.cli.load.workload import Arrival, Block, Workload, prompt_ids
from tandem.protocol.errors import InvalidArgument

EXCERPT = Path(__file__).parents[1] / "traces" / "mooncake_excerpt.jsonl"
VOCABULARY = 49152
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.2299600,3180,8
2023-11-16 18:17:05.9799600,110,27"""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(EXCERPT)


def test_a_trace_keeps_its_moments_and_lengths(trace: Trace) -> None:
    lines = [json.loads(line) for line in EXCERPT.read_text().splitlines()]
    assert len(trace.requests) == len(lines) == 37
    for request, line in zip(trace.requests, lines, strict=True):
        assert request.due_s == (line["timestamp"] - lines[0]["timestamp"]) / 1000
        assert request.prompt_tokens == line["input_length"]
        assert request.new_tokens == line["output_length"]
        assert [block.key for block in request.prompt] == line["hash_ids"]


@pytest.mark.parametrize("scale", [1.0, 0.02])
def test_tokens_are_shared_exactly_where_hashes_are(trace: Trace, scale: float) -> None:
    named: dict[int, set[bytes]] = defaultdict(set)
    for request in trace.scaled(scale).requests:
        ids = prompt_ids(request.prompt, 7, VOCABULARY)
        assert ids.size == request.prompt_tokens
        assert 0 <= ids.min() <= ids.max() < VOCABULARY
        for block in request.prompt:
            named[block.key].add(ids[: block.tokens].tobytes())
            ids = ids[block.tokens :]
    assert all(len(blocks) == 1 for blocks in named.values()), "equal hashes, equal tokens"
    assert len({block for blocks in named.values() for block in blocks}) == len(named), "else different ones"
    shared = [request for request in trace.requests if len(request.prompt) > 1]
    pairs = sum(a.prompt[:2] == b.prompt[:2] for a, b in itertools.combinations(shared, 2))
    assert pairs > 10, "the excerpt has conversations"


def test_a_block_cut_short_is_the_beginning_of_the_block() -> None:
    whole, cut = (prompt_ids((Block(5, tokens),), 1, VOCABULARY) for tokens in (512, 100))
    assert (whole[:100] == cut).all()
    assert (prompt_ids((Block(5, 100),), 2, VOCABULARY) != cut).any(), "another seed, other tokens"


def test_scaling_shortens_blocks_prompts_and_answers_alike(trace: Trace) -> None:
    for was, request in zip(trace.requests, trace.scaled(1 / 64).requests, strict=True):
        assert {block.tokens for block in request.prompt[:-1]} <= {BLOCK_TOKENS // 64}
        assert 1 <= request.prompt[-1].tokens <= BLOCK_TOKENS // 64
        assert request.new_tokens == max(1, round(was.new_tokens / 64))


def test_a_trace_at_a_rate_keeps_its_bursts(trace: Trace) -> None:
    """Takes 36 of the 37 requests, which arrived within 462 s, in 18 s."""
    workload = trace.at(rate=2, seconds=18, seed=3)
    assert len(workload.arrivals) == 36
    assert workload.seed == 3
    for was, arrival in zip(trace.requests, workload.arrivals, strict=False):
        assert arrival.due_s == pytest.approx(was.due_s * 18 / 462)
    assert workload.arrivals[3].due_s < workload.arrivals[4].due_s == workload.arrivals[5].due_s
    assert workload.arrivals[-1].due_s < 18


def test_all_of_a_trace_ends_a_mean_gap_after_its_last_request(trace: Trace) -> None:
    workload = trace.at(rate=1, seconds=37, seed=0)
    assert len(workload.arrivals) == 37
    assert workload.arrivals[-1].due_s == pytest.approx(36)


def test_a_trace_at_a_speed(trace: Trace) -> None:
    workload = trace.at_speed(10, seconds=2, seed=0)
    assert [arrival.due_s for arrival in workload.arrivals] == [
        request.due_s / 10 for request in trace.requests if request.due_s < 20
    ]
    assert workload.rate == len(workload.arrivals) / 2


@pytest.mark.parametrize(("rate", "seconds", "words"), [(10, 60, "the trace has 37"), (0.001, 1, "0 requests")])
def test_a_trace_cannot_give_more_than_it_has(trace: Trace, rate: float, seconds: float, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        trace.at(rate, seconds, 0)


def test_requests_that_arrive_at_once_have_no_rate() -> None:
    trace = Trace("burst", tuple(Arrival(0.0, (Block(i, 8),), 1) for i in range(5)))
    with pytest.raises(InvalidArgument, match="arrive at once"):
        trace.at(2, 2, 0)


def test_azure_prompts_share_nothing(tmp_path: Path) -> None:
    file = tmp_path / "code.csv"
    file.write_text(AZURE)
    requests = read_trace(file).requests
    assert [(r.due_s, r.prompt_tokens, r.new_tokens) for r in requests] == [
        (0.0, 4808, 10),
        (pytest.approx(0.25), 3180, 8),
        (pytest.approx(2.0), 110, 27),
    ]
    assert len({block.key for request in requests for block in request.prompt}) == 3


GOOD = '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0, 1]}'
WRONG = {
    "{": "is no JSON",
    "[1]": "is no JSON object",
    GOOD.replace("0,", '"x",', 1): "timestamp 'x' is no number of milliseconds",
    GOOD.replace("0,", "-1,", 1): "timestamp -1 is no number",
    GOOD.replace("513", "0"): "input_length 0 is no number of tokens above 0",
    GOOD.replace("513", "512.5"): "input_length 512.5",
    GOOD.replace("513", "512"): "has 2 hash_ids for 512 tokens",
    GOOD.replace(": 1,", ": null,"): "output_length None",
    GOOD.replace("[0, 1]", "[0, -1]"): "hash_ids is no list of numbers",
    '{"timestamp": 0}': "input_length None",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(InvalidArgument) as error:
        read_trace(file)
    assert error.value.field == "bad.jsonl line 3"
    assert WRONG[line] in error.value.message


@pytest.mark.parametrize(
    ("was", "becomes", "message"),
    [
        ("TIMESTAMP", "WHEN", "line 1: is not TIMESTAMP,ContextTokens,GeneratedTokens"),
        (",8\n", "\n", "line 3: has 2 fields, not 3"),
        ("2023-11-16 18:17:04.2299600", "yesterday", "line 3: TIMESTAMP 'yesterday' is no ISO date and time"),
        (",8\n", ",-8\n", "line 3: GeneratedTokens '-8' is no number of tokens above 0"),
    ],
)
def test_a_wrong_row_is_named(was: str, becomes: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(AZURE.replace(was, becomes))
    with pytest.raises(InvalidArgument, match=message.replace("(", r"\(")):
        read_trace(file)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("x.txt", "", "neither a .jsonl nor a .csv"), ("x.jsonl", "\n", "has no requests"), ("no.csv", None, "No such")],
)
def test_a_file_without_requests_is_named(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidArgument, match=name) as error:
        read_trace(tmp_path / name)
    assert message in error.value.message


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_arrivals_have_the_rate_and_the_burstiness(cv: float) -> None:
    workload = Synthetic(Lengths(100), Lengths(10), cv).at(rate=20, seconds=1000, seed=1)
    due = np.array([arrival.due_s for arrival in workload.arrivals])
    gaps = np.diff(due, prepend=0)
    assert due.size / 1000 == pytest.approx(20, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert 0 < due[0] <= due[-1] < 1000
    assert (gaps >= 0).all()


def test_the_same_seed_gives_the_same_load() -> None:
    source = Synthetic(Lengths(2000, 0.8), Lengths(500, 0.5))
    assert source.at(5, 20, 4) == source.at(5, 20, 4)
    assert source.at(5, 20, 4).arrivals != source.at(5, 20, 5).arrivals
    slow, fast = source.at(1, 20, 4).arrivals, source.at(2, 20, 4).arrivals
    assert len(slow) < len(fast)
    lengths = [[(a.prompt_tokens, a.new_tokens) for a in arrivals[: len(slow)]] for arrivals in (slow, fast)]
    assert lengths[0] == lengths[1]


def test_lengths_have_their_mean() -> None:
    drawn = np.array(Lengths(2000, 0.8).draw(np.random.default_rng(0), 20_000))
    assert drawn.mean() == pytest.approx(2000, rel=0.03)
    assert np.log(drawn).std() == pytest.approx(0.8, rel=0.03)
    assert Lengths(70).draw(np.random.default_rng(0), 3) == [70, 70, 70]
    assert min(Lengths(1, 3.0).draw(np.random.default_rng(0), 100)) == 1


def test_lengths_are_read_from_words() -> None:
    assert Lengths.parse("--x", "500") == Lengths(500)
    assert Lengths.parse("--x", "lognormal:500:0.8") == Lengths(500, 0.8)
    assert str(Lengths(500, 0.8)) == "500s0.8"


@pytest.mark.parametrize(
    "text", ["", "x", "0", "nan", "normal:5:1", "lognormal:5", "lognormal:5:-1", "lognormal:5:1:1"]
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--x: .* is neither a number of tokens nor"):
        Lengths.parse("--x", text)


def test_requests_are_cut_to_the_context_from_the_end() -> None:
    blocks = (Block(1, 60), Block(2, 60))
    arrivals = tuple(Arrival(float(i), blocks, new) for i, new in enumerate((8, 30, 900)))
    cut = Workload("w", 1, 3, 0, arrivals).fitted(128)
    assert cut.arrivals[0] == arrivals[0]
    assert cut.arrivals[1] == Arrival(1.0, (Block(1, 60), Block(2, 38)), 30)
    assert cut.arrivals[2] == Arrival(2.0, (Block(1, 60), Block(2, 4)), 64)
    assert cut.clipped == 2
    assert Arrival(0.0, blocks, 64).fitted(124).prompt == (Block(1, 60), Block(2, 2))
    assert Arrival(0.0, blocks, 60).fitted(120).prompt == (Block(1, 60),)


def test_a_load_without_requests_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no request is due within"):
        Synthetic(Lengths(5), Lengths(5)).at(1, 0.001, 0)
