"""Model folders that cannot be served: one sentence that names the file, and the tensor or the field."""

import itertools
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.models.load_spec import load_spec, parse_spec
from tandem.engine.weights.checkpoint import check_model
from tandem.protocol.errors import ModelError
from tests.factories import FAMILIES, write_tiny_model

Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"
ROUTER = "model.layers.1.mlp.gate.weight"


def refusal(folder: Path) -> str:
    """Returns the reason, which is one sentence."""
    with pytest.raises(ModelError) as caught:
        check_model(folder)
    message = caught.value.message
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 800, "with the names of all families"
    return message


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("qwen3_moe", without(".experts."), ["model.layers.0.mlp.experts.0.gate_proj.weight", " and 69 more"]),
        ("qwen3_moe", without(".experts.7.up_proj"), ["model.layers.2.mlp.experts.7.up_proj.weight"]),
        ("qwen3_moe", lambda tensors: tensors | {ROUTER: torch.ones(4, 64)}, [ROUTER, "[4, 64]", "[8, 64]", WEIGHTS]),
        ("gpt_oss", without("sinks"), ["lacks tensor model.layers.0.self_attn.sinks", " and 1 more"]),
        ("gpt_oss", without("router.bias"), ["model.layers.0.mlp.router.bias", " and 1 more"]),
        ("deepseek_v3", without("e_score_correction_bias"), ["mlp.gate.e_score_correction_bias"]),
    ],
)
def test_wrong_tensors(tmp_path: Path, family: str, change: Callable[[Tensors], Tensors], words: list[str]) -> None:
    folder = write_tiny_model(tmp_path, family)
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    message = refusal(folder)
    for word in (str(folder), *words):
        assert word in message


FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3_moe", {"hidden_act": "relu"}, "hidden_act 'relu'"),
    ("qwen3_moe", {"hidden_act": "gelu_new"}, "hidden_act 'gelu_new' is not supported for experts"),
    ("qwen3", {"hidden_act": "relu2"}, "hidden_act 'relu2'"),
    ("mistral", {"sliding_window": 0}, "sliding_window 0"),
    ("gpt_oss", {"sliding_window": 0}, "sliding_window 0"),
    ("qwen3_moe", {"num_experts_per_tok": 17}, "17 experts a token cannot be chosen from 8"),
    ("deepseek_v3", {"topk_group": 1}, "3 experts a token cannot be chosen from 2"),
    ("deepseek_v3", {"n_group": 3}, "8 experts do not divide into 3 groups"),
    ("glm4_moe", {"n_group": 3}, "8 experts do not divide into 3 groups"),
    ("deepseek_v2", {"n_group": 0}, "n_group 0 is not supported; it must be at least 1"),
    ("deepseek_v3", {"topk_group": 9}, "9 groups of experts cannot be chosen from 4"),
    ("deepseek_v3", {"n_group": 8, "topk_group": 8}, "8 experts in 8 groups: a group's score is that of two experts"),
    ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank 0 is not supported; it must be at least 1"),
    ("llama3", {"hidden_size": 0, "head_dim": 16}, "hidden_size 0 is not supported; it must be at least 1"),
    ("llama3", {"hidden_size": 64.5}, "hidden_size 64.5 is not supported; it must be a whole number"),
    ("hunyuan_v1_moe", {"moe_topk": [2, "3", 2]}, "moe_topk '3' is not supported; it must be a number"),
    ("granite", {"logits_scaling": 1e999}, "logits_scaling inf is not supported; it must be finite"),
    ("llama3", {"num_key_value_heads": -2}, "num_key_value_heads -2 is not supported; it must be at least 1"),
    ("llama3", {"rms_norm_eps": -1.0}, "the epsilon -1.0 of the norms is not supported"),
    ("qwen3", {"rope_theta": -10.0}, "rope_theta -10 is not supported; it must be above 0"),
    ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank 0"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave false"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias is not supported for experts"),
    ("hunyuan_v1_moe", {"use_cla": True}, "use_cla"),
    ("hunyuan_v1_moe", {"moe_topk": [2, 3]}, "moe_topk names 2 layers, num_hidden_layers is 3"),
    ("exaone_moe", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must name 4 layers"),
    ("llama4", {"layer_types": ["full_attention"]}, "layer_types and no_rope_layers must name 4 layers"),
    ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer type 'sliding_attention' is not supported"),
    ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size 0 is not supported; it must be at least 1"),
    ("llama4", {"no_rope_layer_interval": 0}, "no_rope_layer_interval 0 is not supported"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
    ("gemma4_e2b", {"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input 99 is not supported"),
    ("gemma4_e2b", {"num_kv_shared_layers": 5}, "num_kv_shared_layers 5 is not supported: no layer has the keys"),
    (
        "gemma4",
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0}}},
        "partial_rotary_factor 2.0 is not supported",
    ),
    ("mimo_v2_flash", {"swa_v_head_dim": 16}, "swa_v_head_dim 16 is not supported; it must be 32"),
    ("mimo_v2_flash", {"v_head_dim": 0}, "v_head_dim 0 is not supported; it must be at least 1"),
    ("mimo_v2_flash", {"num_key_value_heads": 4}, "4 heads do not divide into the 8 KV heads of a window layer"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", "x"]}, "each dense or sparse"),
    ("cohere2_moe", {"expert_selection_fn": "relu"}, "expert_selection_fn 'relu'"),
    ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, "shared_expert_combination_strategy 'max'"),
    ("cohere2_moe", {"quantization_config": {"quant_method": "fp8"}}, "the average of shared and other experts"),
    ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping 0"),
    ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping 0.0"),
    ("gemma3", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping -1.0"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp6"}}, "is quantized (mxfp6)"),
    ("llama2", {"compression_config": {"quant_method": "compressed-tensors"}}, "is quantized (compressed-tensors)"),
    (
        "llama2",
        {"architectures": ["XForCausalLM"], "vision_config": {"depth": 2}},
        "XForCausalLM is a multimodal model",
    ),
    (
        "llama2",
        {"architectures": ["X"], "vision_config": {"depth": 2}, "text_config": {"model_type": "y"}},
        "X is a multimodal model (vision_config): architecture y (model_type 'y') is not supported",
    ),
]


@pytest.mark.parametrize(("family", "changes", "words"), FIELDS)
def test_wrong_fields(tmp_path: Path, family: str, changes: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family] | changes))
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert words in message


ABSURD: list[tuple[str, dict[str, Any], str]] = [
    ("llama3", {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 is not supported; it must be at most 1024"),
    ("llama3", {"num_hidden_layers": 1e300}, "num_hidden_layers 1e+300"),
    ("llama3", {"num_hidden_layers": "1000000"}, "num_hidden_layers '1000000' "),
    ("llama3", {"num_hidden_layers": int("9" * 400)}, "num_hidden_layers inf"),
    ("gemma3", {"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers"),
    ("llama3", {"hidden_size": 10**12}, "hidden_size 1e+12"),
    ("llama3", {"vocab_size": 10**18}, "vocab_size 1e+18"),
    ("llama3", {"max_position_embeddings": 10**12}, "max_position_embeddings 1e+12"),
    ("gemma3", {"sliding_window": 10**30}, "sliding_window 1e+30"),
    ("qwen3_moe", {"num_experts": 10**6}, "num_experts 1000000"),
    ("qwen3_moe", {"num_experts": 4096, "num_hidden_layers": 1024}, "experts in all layers 4194304"),
    ("gpt_oss", {"num_local_experts": 10**9}, "num_local_experts"),
    ("ernie4_5_moe", {"moe_num_experts": 10**9}, "moe_num_experts"),
    ("deepseek_v3", {"n_routed_experts": 10**8, "kv_lora_rank": 10**9}, "n_routed_experts"),
    (
        "llama3",
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 8}},
        "the context inf is not supported",
    ),
]


@pytest.mark.parametrize(("family", "changes", "words"), ABSURD)
def test_absurd_sizes_are_refused_before_anything_is_built(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    config = {key: value for key, value in (FAMILIES[family] | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert words in message


NO_NUMBERS = ["wide", [], {}, True, float("nan"), float("inf")]
OTHER_TYPES = {"bos_token_id", "eos_token_id", "pad_token_id", "sliding_window_pattern"}
"""Fields that are numbers in the tiny configurations, and may be lists, text or unused in others."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_that_is_no_number_is_refused_by_the_field_s_name(family: str) -> None:
    config = {name: value for name, value in FAMILIES[family].items() if value is not None}
    fields = [name for name, value in config.items() if type(value) in (int, float) and name not in OTHER_TYPES]
    for name, wrong in itertools.product(fields, NO_NUMBERS):
        with pytest.raises(ModelError, match=f"^{name} .* is not supported; it must be "):
            parse_spec(config | {name: wrong})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_left_out_has_a_default_or_is_named(family: str) -> None:
    """A KeyError has the name; any other conversion of a missing field fails this test."""
    config = {name: value for name, value in FAMILIES[family].items() if value is not None}
    for missing in config:
        with suppress(ModelError, KeyError):
            parse_spec({name: value for name, value in config.items() if name != missing})


def absurd_header(count: int = 1, *, shape: list[int] | None = None, padding: int = 0) -> bytes:
    entry = {"dtype": "F32", "shape": [1] if shape is None else shape, "data_offsets": [0, 4]}
    return json.dumps({f"t{number}": entry for number in range(count)}).encode() + b" " * padding


@pytest.mark.parametrize(
    ("make_header", "length", "words"),
    [
        (lambda: b"{}", 1 << 63, "is truncated or no safetensors file"),
        (lambda: absurd_header(300_000), None, "has a header of"),
        (lambda: absurd_header(padding=70 << 20), None, "and the limit is 8388608; save it again in parts"),
        (lambda: absurd_header(shape=[10**30, 10**30]), None, "a tensor's bytes do not match its shape"),
        (lambda: absurd_header(shape=[1] * 10**5), None, "a tensor has 100000 dimensions"),
        (lambda: absurd_header(shape=[-1, -1]), None, "an entry has a size or an offset that is no natural number"),
        (lambda: b"[" * 10**6, None, "has a corrupt safetensors header (maximum recursion depth"),
    ],
    ids=["length", "tensors", "padding", "shape", "dimensions", "negative", "depth"],
)
def test_absurd_headers_are_refused_before_they_are_read(
    tmp_path: Path, make_header: Callable[[], bytes], length: int | None, words: str
) -> None:
    folder, header = write_tiny_model(tmp_path), make_header()
    start = (len(header) if length is None else length).to_bytes(8, "little")
    (folder / WEIGHTS).write_bytes(start + header + bytes(4))
    assert words in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"a":"' + b"x" * (25 << 20) + b'"}', "bytes, more than 25165824"),
        (b'{"a":' * 10**5, "cannot be read as JSON"),
    ],
    ids=["large", "deep"],
)
def test_absurd_json_is_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    folder = write_tiny_model(tmp_path)
    (folder / name).write_bytes(content)
    message = refusal(folder)
    assert message.startswith(str(folder / name))
    assert words in message


def test_an_index_of_absurdly_many_files_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    index = {"weight_map": {f"t{number}": f"f{number}" for number in range(10_001)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names 10001 files, more than 10000" in refusal(folder)


def test_quantized_by_a_file_of_its_own(tmp_path: Path) -> None:
    (write_tiny_model(tmp_path) / "hf_quant_config.json").write_text("{}")
    assert "is quantized (modelopt, no quant_algo)" in refusal(tmp_path)


def write_multimodal(folder: Path, rename: Callable[[str], str]) -> Path:
    """A model of images and text, whose text part is Gemma 3's."""
    text = write_tiny_model(folder, "gemma3")
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    inner = {key: value for key, value in FAMILIES["gemma3"].items() if value is not None and key != "eos_token_id"}
    config = outer | {"text_config": inner, "vision_config": {"model_type": "siglip_vision_model"}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {rename(name): tensor for name, tensor in load_file(text / WEIGHTS).items()}
    tower = {"vision_tower.patch.weight": torch.ones(3), "model.multi_modal_projector.weight": torch.ones(2)}
    save_file(tensors | tower, folder / WEIGHTS)
    return folder


RENAMES: dict[str, Callable[[str], str]] = {
    "transformers 4": lambda name: f"language_model.{name}",
    "transformers 5": lambda name: name.replace("model.", "model.language_model.", 1),
}


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
def test_the_text_part_of_a_multimodal_model(
    tmp_path: Path, rename: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    from tandem.engine.models.allocation import allocate_parameters
    from tandem.engine.models.parameters import tensors_of
    from tandem.engine.weights.checkpoint import load_weights

    alone = load_spec(write_tiny_model(tmp_path / "alone", "gemma3"))
    folder = write_multimodal(tmp_path / "both", rename)
    spec = check_model(folder)
    assert spec.layers == alone.layers
    assert spec.eos_token_ids == (1, 106)
    loaded = [allocate_parameters(alone, torch.float32, torch.device("cpu")) for _ in range(2)]
    with caplog.at_level("INFO"):
        load_weights(folder, spec, loaded[0])
    load_weights(tmp_path / "alone", alone, loaded[1])
    for (name, ours), (_, theirs) in zip(*map(tensors_of, loaded), strict=True):
        assert torch.equal(ours, theirs), name
    (line,) = [record.message for record in caplog.records if "text part" in record.message]
    assert "images and the like are not (vision_config)" in line


@pytest.mark.parametrize(
    ("family", "outer"),
    [
        ("mistral", {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}),
        ("qwen2", {"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl"}),
    ],
)
def test_the_outer_configuration_may_tie_the_embeddings(tmp_path: Path, family: str, outer: dict[str, Any]) -> None:
    """As transformers 5 saves such models: the text part says false, which is the default of a text model."""
    alone = write_tiny_model(tmp_path / "alone", family, tie_word_embeddings=True)
    folder = tmp_path / "both"
    folder.mkdir()
    inner = json.loads((alone / "config.json").read_text()) | {"tie_word_embeddings": False}
    config = outer | {"tie_word_embeddings": True, "text_config": inner, "vision_config": {"model_type": "pixtral"}}
    (folder / "config.json").write_text(json.dumps(config))
    text = {f"language_model.{name}": tensor for name, tensor in load_file(alone / WEIGHTS).items()}
    save_file(text | {"vision_tower.patch.weight": torch.ones(3)}, folder / WEIGHTS)
    assert not any("lm_head" in name for name in text)
    spec = check_model(folder)
    assert spec.tied_embeddings
    assert spec == check_model(alone)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert "lacks tensor lm_head.weight" in refusal(folder)


def test_a_text_part_that_does_not_stand_alone(tmp_path: Path) -> None:
    folder = write_multimodal(tmp_path, RENAMES["transformers 4"])
    tensors = load_file(folder / WEIGHTS)
    cross = {"language_model.model.layers.0.cross_attn.q_proj.weight": torch.ones(2)}
    save_file(tensors | cross, folder / WEIGHTS)
    assert "has tensor model.layers.0.cross_attn.q_proj.weight" in refusal(folder)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    tensors = load_file(folder / WEIGHTS)
    for name in ("model.layers.3.eh_proj.weight", "model.mtp_block.0.mlp.up_proj.weight", "mtp.fc.weight"):
        save_file(tensors | {name: torch.ones(2)}, folder / WEIGHTS)
        check_model(folder)
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(2)}, folder / WEIGHTS)
    assert "has tensor model.layers.4.eh_proj.weight" in refusal(folder)
