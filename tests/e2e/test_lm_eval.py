"""lm-eval's log-likelihoods through `local-completions` and through its own transformers back end.

It runs in the virtual environment that `.ci/client_environments` creates; see test_external_clients.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.soak import soak

QUESTIONS = 24
TASK = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
CAPITALS = {
    "France": ("Paris", "Lyon"),
    "Japan": ("Tokyo", "Osaka"),
    "Australia": ("Canberra", "Sydney"),
    "Canada": ("Ottawa", "Toronto"),
    "Turkey": ("Ankara", "Istanbul"),
    "Nigeria": ("Abuja", "Lagos"),
    "Myanmar": ("Naypyidaw", "Yangon"),
    "Tanzania": ("Dodoma", "Dar es Salaam"),
    "Kazakhstan": ("Astana", "Almaty"),
    "Bolivia": ("Sucre", "Santa Cruz"),
}
"""Capitals by country, each with a larger or better known city."""


def write_task(folder: Path) -> None:
    """Writes a task of questions with four choices each, some of which a small model gets wrong."""
    dice = random.Random(5)
    rows = []
    for number in range(QUESTIONS):
        country, (capital, city) = dice.choice(sorted(CAPITALS.items()))
        elsewhere = sorted({capital for name, (capital, _) in CAPITALS.items() if name != country})
        choices = dice.sample([capital, city, *dice.sample(elsewhere, 2)], 4)
        question = f"{dice.choice(['Question', 'Quiz'])} {number}. The capital of {country} is the city of"
        rows.append({"question": question, "choices": choices, "answer": choices.index(capital)})
    data = folder / "capitals.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (folder / "capitals.yaml").write_text(TASK.format(data=data))


@soak
@pytest.mark.timeout(1700.0)
def test_a_multiple_choice_task_has_the_accuracy_of_transformers(
    run: Callable[..., str], running_cluster: Callable[..., Any], model_folder: Path, tmp_path: Path
) -> None:
    cluster = running_cluster(dtype="float32", page_tokens=16, max_step_tokens=128)
    write_task(tmp_path)
    served = (
        f"model=SmolLM2-135M-Instruct,base_url=http://{cluster.http_address}/v1/completions,num_concurrent=2"
        f",tokenizer_backend=huggingface,tokenizer={model_folder},max_length=2048"
    )
    local = f"pretrained={model_folder},dtype=float32"
    results = {}
    for model, arguments in (("local-completions", served), ("hf", local)):
        run(
            "lm-eval",
            *("lm_eval", "--model", model, "--model_args", arguments, "--batch_size", "8", "--device", "cpu"),
            *("--tasks", "capitals", "--include_path", str(tmp_path), "--output_path", str(tmp_path / model)),
            "--log_samples",
            HF_HUB_OFFLINE="1",
            HF_HOME=str(tmp_path / "home"),
            HF_DATASETS_CACHE=str(tmp_path / "datasets"),
        )
        (summary,) = (tmp_path / model).rglob("results_*.json")
        (samples,) = (tmp_path / model).rglob("samples_*.jsonl")
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
        results[model] = (
            json.loads(summary.read_text())["results"]["capitals"],
            sorted(rows, key=lambda row: int(row["doc_id"])),
        )
    (ours, our_rows), (theirs, their_rows) = results["local-completions"], results["hf"]
    for metric in ("acc,none", "acc_norm,none"):
        assert ours[metric] == theirs[metric]
    assert 0.3 < theirs["acc,none"] < 1.0, "the questions tell right from wrong answers"
    for here, there in zip(our_rows, their_rows, strict=True):
        for (value, greedy), (wanted, their_greedy) in zip(
            here["filtered_resps"], there["filtered_resps"], strict=True
        ):
            assert float(value) == pytest.approx(float(wanted), abs=1e-3)
            assert greedy == their_greedy
