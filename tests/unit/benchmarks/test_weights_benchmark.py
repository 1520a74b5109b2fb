"""The weights benchmark's files and output on a tiny shape; no timing."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import weights
from tandem.engine.models import shapes
from tandem.engine.models.parameters import tensors_of
from tandem.engine.weights.checkpoint import check_model
from tests.factories import FAMILIES

LAYER_BYTES = 2 * (4 * 64 * 64 - 2 * 32 * 64 + 3 * 64 * 96 + 2 * 64)
REST_BYTES = 2 * (2 * 160 * 64 + 64)


@pytest.fixture(autouse=True)
def _tiny_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps(FAMILIES["llama3"] | {"num_hidden_layers": 40}))
    monkeypatch.setattr(shapes, "_HERE", tmp_path)
    monkeypatch.setattr(weights, "_COPY_BYTES", 1 << 20)


@pytest.mark.parametrize(("layers", "size"), [(1, 0), (3, REST_BYTES + 3 * LAYER_BYTES), (40, 1 << 30)])
def test_the_checkpoint_has_the_size_asked_for_and_can_be_served(layers: int, size: int, tmp_path: Path) -> None:
    config = weights.write_checkpoint(tmp_path / "made", "tiny", size)
    assert len(config.layers) == layers
    assert check_model(tmp_path / "made") == config
    files = sorted(file.name for file in (tmp_path / "made").glob("*.safetensors"))
    assert len(files) == layers + 1


def test_every_weight_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = weights.write_checkpoint(tmp_path / "made", "tiny", REST_BYTES + 2 * LAYER_BYTES)
    loaded = []
    load = weights.load_weights
    monkeypatch.setattr(weights, "load_weights", lambda *given: (load(*given), loaded.append(given[2])))
    result = weights.measure(tmp_path / "made", config, torch.device("cpu"), torch.float32, rounds=2)
    assert len(result["load_seconds"]) == len(loaded) == 2  # type: ignore[arg-type]
    assert all(tensor.count_nonzero() > 0.9 * tensor.numel() for _, tensor in tensors_of(loaded[0]))


def test_the_last_line_is_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights.main(["--shape", "tiny", "--gib", "0.0001", "--rounds", "1", "--folder", str(tmp_path)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["load_gb_per_s"] > 0
    assert result["load_ratio"] > 0
    assert result["host_extra_gib"] >= 0
    assert {"shape", "layers", "dtype", "checkpoint_gib", "hardware", "commit", "command", "date"} <= result.keys()
    assert not list(tmp_path.glob("tandem-weights-*"))
