"""Quantized folders as transformers loads them, with the package of the format: the weights of a plain reader."""

from pathlib import Path

import pytest
import torch

from tandem.engine.quantizer.quantize import QuantizationRecipe, quantize
from tandem.engine.quantizer.scheme import SCHEMES
from tests.factories import write_tiny_model
from tests.unit.engine.quantizer.plain_reader import read_plainly, write_plain_copy

pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
pytestmark = pytest.mark.filterwarnings("default")

IDS = torch.arange(3, 40)[None]


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.quantizes])
@pytest.mark.parametrize("family", ["llama3", "qwen2"])
def test_transformers_loads_the_folder(scheme: str, family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    folder = write_tiny_model(tmp_path / "tiny", family)
    quantize(folder, tmp_path / "out", QuantizationRecipe(SCHEMES[scheme]), device=torch.device("cpu"))
    plain = AutoModelForCausalLM.from_pretrained(write_plain_copy(tmp_path / "out", tmp_path / "copy"))
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=CompressedTensorsConfig(run_compressed=False), dtype=torch.float32
    )
    for name, weight in read_plainly(tmp_path / "out").items():
        assert torch.allclose(model.get_parameter(name), weight, atol=1e-6), name
    with torch.no_grad():
        logits, wanted = model(IDS).logits, plain(IDS).logits
    # Activations of 8 bits are rounded, too.
    assert (logits - wanted).abs().mean() < (0.2 if SCHEMES[scheme].activations else 1e-4) * wanted.std()
