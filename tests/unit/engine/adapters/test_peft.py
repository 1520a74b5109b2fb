"""Adapters as peft itself saves them, against peft's own logits. Needs peft, which nothing else here does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.settings.parsing import NamedPath
from tests.factories import draw, tiny_engine_config, write_tiny_model

pytestmark = pytest.mark.usefixtures("adapters_read_here")

peft = pytest.importorskip("peft", reason="needs the package peft")
IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]

CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "every layer": {"r": 5, "lora_alpha": 3, "target_modules": "all-linear"},
    "rank-stabilized": {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["up_proj", "down_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "gate_proj"],
        "rank_pattern": {"v_proj": 6, "layers.1.self_attn.q_proj": 3},
        "alpha_pattern": {"gate_proj": 2, "layers.[02].self_attn.q_proj": 5},
    },
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, by peft
@pytest.mark.parametrize("family", ["llama3", "qwen3", "phi3"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_pefts(name: str, family: str, tmp_path: Path) -> None:
    given = CONFIGS[name]
    if family == "phi3" and name != "every layer":
        pytest.skip("it has no layers of these names")
    folder = write_tiny_model(tmp_path / "model", family)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(1)
    model = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **given))
    model.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        wanted = model.eval()(torch.tensor([IDS])).logits[0, -1:]
        with model.disable_adapter():
            assert (model(torch.tensor([IDS])).logits[0, -1:] - wanted).abs().max() > 0.05
    sources = (NamedPath("one", tmp_path / "adapter"),)
    runner = ModelRunner.load(tiny_engine_config(folder, loras=sources))
    actual = runner.logits(StepBatch([StepRow(IDS, 0, [0], draw(), adapter=1)]))
    torch.testing.assert_close(actual, wanted, atol=3e-5, rtol=3e-5)
