"""`tandem train-draft` on a tiny model: its loss falls, what it writes serves, and answers stay the same."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.speculation.local_worker import LocalWorker
from router.text.tokenizer import Tokenizer
from tandem.cli.main import app
from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.proposer import ProposerName
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tests.factories import tiny_engine_config, write_tiny_model
from tests.small_tokenizer import save_tokenizer

SAMPLINGS = [
    SamplingParams(40, ignore_eos=True),
    SamplingParams(40, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True),
    SamplingParams(40, temperature=0.8, top_k=20, seed=4, ignore_eos=True),
    SamplingParams(40, temperature=0.8, min_p=0.1, seed=5, ignore_eos=True),
    SamplingParams(40, frequency_penalty=0.5, ignore_eos=True),
]
PARAGRAPHS = [f"A paragraph about the number {n} and what it is good for." for n in range(12)]
TRAINING = ("--tokens", "1500", "--heads", "2", "--vocabulary", "64", "--epochs", "60", "--temperature", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab_size=300)
    save_tokenizer(folder, tokens=300)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "prompts.txt"
    file.write_text("\n\n".join(PARAGRAPHS))
    return file


@pytest.fixture(scope="module", params=["medusa", "eagle"])
def trained(request: pytest.FixtureRequest, model: Path, text: Path) -> tuple[Path, str]:
    out = model.parent / str(request.param)
    command = ["train-draft", str(model), "--out", str(out), "--text", str(text), "--threads", "1", *TRAINING]
    command += ["--kind", str(request.param)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    return out, result.output


def test_the_loss_falls(trained: tuple[Path, str]) -> None:
    folder, said = trained
    facts = json.loads((folder / "config.json").read_text())["tandem_training"]
    assert facts["losses"][-1] < 0.9 * facts["losses"][0]
    assert facts["tokens"] + facts["held_out_tokens"] > 1000
    assert f"{facts['tokens']:,} tokens learned" in said
    assert f"{facts['tokens_a_step'][1]:.2f} with 2 drafts at most" in said


async def test_answers_are_the_same_and_drafts_are_accepted(model: Path, trained: tuple[Path, str]) -> None:
    answers: list[Any] = []
    prompts = [Tokenizer(model).encode(paragraph) for paragraph in PARAGRAPHS[: len(SAMPLINGS)]]
    for method, draft in ((SpeculationMethod.OFF, None), (SpeculationMethod.DRAFT, trained[0])):
        config = tiny_engine_config(model, draft=draft)
        runner = ModelRunner.load(config)
        async with LocalWorker.open(runner, config, method) as worker:
            if draft is not None:
                worker.speculation.fixed_drafts = 2
            sent = [worker.send(prompt, sampling) for prompt, sampling in zip(prompts, SAMPLINGS, strict=True)]
            for answer in sent:
                await answer.finished.wait()
            answers.append([answer.token_ids for answer in sent])
            if draft is not None:
                counts = worker.speculation.counts
                wanted = ProposerName.EAGLE if trained[0].name == "eagle" else ProposerName.MEDUSA
                assert {source.proposer for source, _ in counts.drafted} == {wanted}
                assert {position for _, position in counts.drafted} == {0, 1}
                assert sum(counts.accepted.values()) > 10
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--text", "/nowhere/text"], "error: --text: /nowhere/text cannot be read"),
        (["--text", "/dev/null"], "error: --text: has no paragraph to answer"),
        (["--kind", "oracle"], "error: --kind: 'oracle' is not known; use medusa or eagle"),
    ],
)
def test_what_cannot_be_trained_is_a_sentence(model: Path, tmp_path: Path, options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(app, ["train-draft", str(model), "--out", str(tmp_path / "out"), *options])
    assert (result.exit_code, sentence in result.output) == (2, True), result.output
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(model: Path, text: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train-draft", str(model), "--out", str(tmp_path), "--text", str(text)])
    assert "error: --out: " in result.output
    assert "exists" in result.output
