"""A tiny model of each family, written as llama.cpp's converter does, has the logits of its safetensors."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import cast

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tandem.engine.config.model import LatentAttention
from tandem.engine.config.sharding import Rank, rank_spec
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import allocate_parameters, quantized_weights
from tandem.engine.models.load_spec import parse_spec
from tandem.engine.models.parameters import named_weights
from tandem.engine.steps.batch import StepBatch
from tandem.engine.weights import gguf as conversion
from tandem.engine.weights.checkpoint import check_model, load_weights
from tandem.engine.weights.gguf import prepare_model
from tandem.engine.weights.gguf_architectures import ARCHITECTURES
from tandem.engine.weights.gguf_config import ROPE_FACTORS, huggingface_config
from tandem.protocol.errors import ModelError
from tests.factories import FAMILIES, row, tiny_engine_config, write_tiny_model
from tests.unit.engine.weights import gguf_files
from tests.unit.engine.weights.gguf_files import CASES, write_family

STATES = ["lfm2", "lfm2_moe", "nemotron_h", "nemotron_h_experts", "granitemoehybrid"]
STATES += ["qwen3_next", "qwen3_5", "kimi_linear"]
STACKED = ["gemma4_experts", "granite_moe", "llama4", "mistral4", "qwen3_5_moe"]
"""Families whose checkpoints have the experts of a layer in one tensor."""


@pytest.fixture
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_write_tokenizer", lambda *_: None)


def logits(folder: Path) -> torch.Tensor:
    # Enough pages for models with several groups of layers, each of which has its own.
    batch = StepBatch([row(list(range(3, 43)), 0, list(range(12)))])
    return ModelRunner.load(tiny_engine_config(folder), kernels=ReferenceKernels()).logits(batch)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("family", CASES)
def test_a_gguf_file_has_the_logits_of_its_safetensors(family: str, tmp_path: Path) -> None:
    folder = prepare_model(write_family(tmp_path / "tiny.gguf", family), tmp_path / "cache")
    twin = write_tiny_model(tmp_path / "twin", family, **CASES[family][1])
    nulls = {field: None for field, value in CASES[family][1].items() if value is None}
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config | nulls))
    torch.testing.assert_close(logits(folder), logits(twin), atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_the_text_of_a_multimodal_file_is_its_text_model(family: str, architecture: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", family, architecture=architecture)
    twin = write_tiny_model(tmp_path / "twin", family)
    torch.testing.assert_close(logits(prepare_model(path, tmp_path / "cache")), logits(twin), atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_the_latent_projection_may_be_one_tensor(family: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", family, split_latent=False)
    twin = write_tiny_model(tmp_path / "twin", family)
    torch.testing.assert_close(logits(prepare_model(path, tmp_path / "cache")), logits(twin), atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize(
    "family",
    [
        *("mixtral", "qwen3_moe", "gemma2", "phi3", "glm4", "deepseek_v3", "cohere2_moe", "gemma4", "gemma4_e2b"),
        *STACKED,
        *STATES,
    ],
)
def test_quantized_blocks_have_the_logits_of_their_values(family: str, tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", family, blocks=gguf.GGMLQuantizationType.Q8_0)
    kept, plain = (prepare_model(path, tmp_path / "cache", codes=codes) for codes in (True, False))
    spec = check_model(kept)
    assert spec.quantization is not None
    if family in STACKED:
        assert {"layers.1.feed_forward.gate_up", "layers.1.feed_forward.down"} <= set(quantized_weights(spec).packings)
    torch.testing.assert_close(logits(kept), logits(plain), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_no_tokenizer")
def test_blocks_of_stacked_experts_are_kept(tmp_path: Path) -> None:
    path = write_family(tmp_path / "tiny.gguf", "gpt_oss", blocks=gguf.GGMLQuantizationType.MXFP4)
    kept, plain = (prepare_model(path, tmp_path / "cache", codes=codes) for codes in (True, False))
    assert {"layers.0.feed_forward.gate_up", "layers.0.feed_forward.down"} <= set(
        quantized_weights(check_model(kept)).packings
    )
    torch.testing.assert_close(logits(kept), logits(plain), atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_reads_its_part_of_kept_blocks(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, changes = CASES["qwen3_5_moe"]
    # Half of a row has whole blocks.
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "linear_value_head_dim": 32}
    monkeypatch.setitem(CASES, "qwen3_5_moe", (kind, changes | sizes))
    path = write_family(tmp_path / "tiny.gguf", "qwen3_5_moe", blocks=gguf.GGMLQuantizationType.Q8_0)
    read = []
    for codes in (True, False):
        folder = prepare_model(path, tmp_path / "cache", codes=codes)
        spec = check_model(folder)
        parameters = allocate_parameters(rank_spec(spec, 2, number), torch.float32, torch.device("cpu"))
        load_weights(folder, spec, parameters, rank=Rank(number, 2))
        read.append(dict(named_weights(parameters)))
    kept, plain = read
    packed = {name: weight for name, weight in kept.items() if isinstance(weight, PackedWeight)}
    assert {"layers.1.attention.output", "layers.1.feed_forward.gate_up", "layers.1.feed_forward.down"} <= packed.keys()
    for name, weight in packed.items():
        torch.testing.assert_close(weight.dequantized(torch.float32), plain[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "kind",
    ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"],
)
def test_every_block_type_of_public_files_is_dequantized(kind: str, tmp_path: Path) -> None:
    blocks = gguf.GGMLQuantizationType[kind]
    size, type_size = gguf.GGML_QUANT_SIZES[blocks]
    data = np.random.default_rng(0).integers(0, 60, (3, 512 // size * type_size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", data, raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    output = conversion._outputs(
        {"token_embd.weight": tensor}, ARCHITECTURES["llama"], {"num_hidden_layers": 0}, codes=False
    )["model.embed_tokens.weight"]
    assert output.shape == (3, 512)
    assert np.array_equal(output.read(), gguf.dequantize(data, blocks))


@pytest.mark.parametrize("kind", ["command-r", "mamba", "gemma3n"])
def test_an_unsupported_architecture_is_named(kind: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", kind)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ModelError, match=f"architecture {kind} is not supported, because there is no table of its tensor names"
    ):
        prepare_model(tmp_path / "m.gguf", tmp_path / "cache")


@pytest.mark.parametrize("agrees", [True, False])
def test_a_tokenizer_that_transformers_cannot_read_is_taken_from_the_folder(agrees: bool, tmp_path: Path) -> None:
    """Transformers has no tokenizer for files of GLM-4; the one beside the file must have the file's tokens."""
    tokens = ["<unk>", "a", "b"]
    path = write_family(tmp_path / "tiny.gguf", "glm4", tokens=tokens)
    with pytest.raises(ModelError, match=r"cannot be converted .* put tokenizer\.json"):
        prepare_model(path, tmp_path / "cache")
    words = {token: number for number, token in enumerate(tokens if agrees else ["<unk>", "b", "a"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>").save_pretrained(tmp_path)
    if agrees:
        assert AutoTokenizer.from_pretrained(prepare_model(path, tmp_path / "cache"))("b")["input_ids"] == [2]
    else:
        with pytest.raises(ModelError, match="has other tokens than the file"):
            prepare_model(path, tmp_path / "cache")


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize(
    ("family", "changes", "error"),
    [
        ("lfm2", {"attention.head_count_kv": 2}, "attention.head_count_kv must have a value for each layer"),
        ("nemotron_h", {"feed_forward_length": 2}, "feed_forward_length must have a value for each layer"),
        ("qwen3_5", {"ssm.group_count": 3}, "ssm.time_step_rank 4 is not a multiple of ssm.group_count 3"),
    ],
)
def test_a_file_with_unusable_metadata_is_refused(
    family: str, changes: dict[str, int], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = gguf_files.metadata
    monkeypatch.setattr(
        gguf_files,
        "metadata",
        lambda config, kind, *, split_latent: counts(config, kind, split_latent=split_latent) | changes,
    )
    with pytest.raises(ModelError, match=error):
        prepare_model(write_family(tmp_path / "tiny.gguf", family), tmp_path / "cache")


@pytest.mark.usefixtures("_no_tokenizer")
def test_a_file_of_gemma_4_without_its_divisors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = gguf_files.converted
    monkeypatch.setattr(
        gguf_files,
        "converted",
        lambda *given: {name: weight for name, weight in tensors(*given).items() if name != ROPE_FACTORS},
    )
    with pytest.raises(ModelError, match=r"lacks rope_freqs\.weight; convert the model to GGUF again"):
        prepare_model(write_family(tmp_path / "tiny.gguf", "gemma4"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("context", "types", "full"),
    [(1 << 20, None, [0, 1, 2, 6]), (1 << 17, None, range(8)), (1 << 20, [True, *[False] * 7], [0])],
)
def test_the_context_says_whether_layers_of_glm_5_share_choices(
    context: int, types: list[bool] | None, full: Collection[int]
) -> None:
    """Files of GLM-5.2, whose context is longer than that of GLM-5, may not say which of its layers do."""
    config = {
        **FAMILIES["glm_moe_dsa"],
        "num_hidden_layers": 8,
        "indexer_types": None,
        "max_position_embeddings": context,
    }
    keys = gguf_files.metadata(
        {name: value for name, value in config.items() if value is not None}, "glm-dsa", split_latent=True
    )
    keys = {f"glm-dsa.{key}": value for key, value in keys.items()}
    keys |= {"general.architecture": "glm-dsa", "glm-dsa.attention.indexer.types": types}
    spec = parse_spec(huggingface_config(keys.get, 160, ["output.weight"], {}))
    attention = [layer.attention for layer in spec.layers]
    assert [n for n, layer in enumerate(attention) if not cast(LatentAttention, layer).shares_choice] == list(full)
