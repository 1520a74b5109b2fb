"""config.json in both of transformers' spellings, and refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tandem.engine.config.model import GroupedQueryAttention, ModelSpec
from tandem.engine.config.rope import RopeConfig
from tandem.engine.models.load_spec import bounded, load_spec, parse_spec
from tandem.engine.models.rope import rope_frequencies, rope_table
from tandem.protocol.errors import InvalidArgument, ModelError
from tests.factories import FAMILIES

DIMS = 16
"""Dimensions of a head of the tiny Llama."""
LONGROPE = FAMILIES["phi3_longrope"]["rope_scaling"]
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": FAMILIES["llama3"]["rope_scaling"],
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_stretched": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    "yarn_mscale": {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16.0},
    "yarn_loose": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "attention_factor": 1.5},
}


def parse(config: dict[str, object], generation: dict[str, object] | None = None) -> ModelSpec:
    return parse_spec(config, generation or {})


def rope_of(spec: ModelSpec) -> RopeConfig:
    rope = spec.layers[0].attention.rope
    assert rope is not None
    return rope


def windows(spec: ModelSpec) -> tuple[int | None, ...]:
    attentions = [layer.attention for layer in spec.layers]
    return tuple(attention.shape.window for attention in attentions if isinstance(attention, GroupedQueryAttention))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_transformers(scaling: str) -> None:
    config = FAMILIES["llama2"] | {"rope_scaling": dict(SCALINGS[scaling])}
    theirs = AutoConfig.for_model(**FAMILIES["llama2"] | {"rope_scaling": dict(SCALINGS[scaling])})
    wanted, attention_factor = ROPE_INIT_FUNCTIONS[str(SCALINGS[scaling]["rope_type"])](theirs, torch.device("cpu"))
    parsed = parse(config)
    torch.testing.assert_close(rope_frequencies(rope_of(parsed), DIMS, parsed.max_context), wanted, rtol=1e-6, atol=0)
    assert rope_of(parsed).attention_factor == pytest.approx(attention_factor)


@pytest.mark.parametrize(("theta", "ends"), [(10000.0, (0, 3)), (4.0, (0, 15)), (2.0, (0, 15))])
def test_yarn_s_ramp_ends_within_the_dimensions(theta: float, ends: tuple[int, int]) -> None:
    """With a small theta, the dimension that turns once in the original context is beyond the last one."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
    config = FAMILIES["llama2"] | {"max_position_embeddings": 1024, "rope_theta": theta, "rope_scaling": scaling}
    parsed = parse(config)
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**config), torch.device("cpu"))
    ours = rope_frequencies(rope_of(parsed), DIMS, parsed.max_context)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    low, high = ends
    divided = ((torch.arange(8.0) - low) / (high - low)).clamp(0, 1)
    plain = theta ** -(torch.arange(8.0) / 8)
    torch.testing.assert_close(ours, plain * (1 - divided + divided / 8.0))


def test_table_holds_cosines_then_sines() -> None:
    table = rope_table(RopeConfig(theta=100.0, attention_factor=2.0), 4, 10, torch.device("cpu"))
    angles = torch.arange(10.0)[:, None] * torch.tensor([1.0, 0.1])
    torch.testing.assert_close(table, 2 * torch.cat((angles.cos(), angles.sin()), dim=1))
    assert table.dtype is torch.float32


@pytest.mark.parametrize("family", FAMILIES)
def test_both_spellings_mean_the_same(family: str, tmp_path: Path) -> None:
    old = FAMILIES[family]
    # transformers writes its own, new spelling.
    AutoConfig.for_model(**old).save_pretrained(tmp_path)
    rotates = any(getattr(layer.attention, "rope", None) for layer in parse(old).layers)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text()) or not rotates
    new = load_spec(tmp_path)
    assert {**_fields(new), "dtype": None} == {**_fields(parse(old)), "dtype": None}


def test_fields_that_published_gemma_files_leave_out(tmp_path: Path) -> None:
    """The text part of a published multimodal model has few fields; the others are those of transformers."""
    published = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    AutoConfig.for_model(**published).save_pretrained(tmp_path)
    assert {**_fields(load_spec(tmp_path)), "dtype": None, "eos_token_ids": ()} == _fields(parse(published))


def test_gpt_oss_is_scaled_where_its_file_does_not_say_how() -> None:
    """Not scaled at all is said by a `rope_type` of `default`."""
    left_out = {key: value for key, value in FAMILIES["gpt_oss_unscaled"].items() if not key.startswith("rope_")}
    assert _fields(parse(left_out)) == _fields(parse(AutoConfig.for_model(**left_out).to_dict()))
    rope = rope_of(parse(left_out))
    assert (rope.kind, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)
    assert rope_of(parse(FAMILIES["gpt_oss_unscaled"])).kind == "default"


def test_generation_config_names_the_end_of_a_turn() -> None:
    assert parse(FAMILIES["llama3"]).eos_token_ids == (2,)
    assert parse(FAMILIES["llama3"], {"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert parse(FAMILIES["llama3"] | {"eos_token_id": None}).eos_token_ids == ()


def test_yarn_stretches_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert parse(FAMILIES["qwen3"] | {"rope_scaling": yarn}).max_context == 2048


@pytest.mark.parametrize(("longest", "name"), [(16, "short_factor"), (17, "long_factor")])
def test_longrope_has_the_short_factors_up_to_the_original_context(longest: int, name: str) -> None:
    spec = bounded(parse(FAMILIES["phi3_longrope"]), longest)
    wanted = 10000.0 ** -(torch.arange(8.0) / 8) / torch.tensor(LONGROPE[name])
    torch.testing.assert_close(rope_frequencies(rope_of(spec), DIMS, spec.max_context), wanted)
    assert rope_of(spec).attention_factor == pytest.approx((1 + 5 / 4) ** 0.5), "ln(512 / 16) / ln(16) is 5 / 4"


def test_the_context_can_be_bounded() -> None:
    spec = parse(FAMILIES["qwen3"])
    assert bounded(spec, None) == spec
    assert bounded(spec, 7) == replace(spec, max_context=7)
    linear = parse(FAMILIES["qwen3"] | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    assert bounded(linear, 2 * spec.max_context).max_context == 2 * spec.max_context
    for tokens in (0, -1, spec.max_context + 1):
        with pytest.raises(InvalidArgument, match="max_model_len"):
            bounded(spec, tokens)


def test_windows_follow_each_family() -> None:
    assert windows(parse(FAMILIES["mistral"])) == (12, 12, 12)
    assert windows(parse(FAMILIES["mistral"] | {"sliding_window": None})) == (None, None, None)
    assert windows(parse(FAMILIES["qwen2"])) == (None, None, None)
    assert windows(parse(FAMILIES["qwen2_windows"])) == (None, 9, 9)
    assert windows(parse(FAMILIES["llama2"] | {"sliding_window": 4})) == (None, None, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
            r"MambaForCausalLM .*Llama, .*Qwen3, ",
        ),
        ({"model_type": None}, "not supported"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "dynamic"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7}}, "7 factors of longrope for 8 pairs of dimensions"),
        ({"rope_scaling": LONGROPE | {"long_factor": [0.0] * 8}}, "long_factor"),
        ({"partial_rotary_factor": 0.2}, "3 of 16 dimensions are rotated"),
        ({"num_key_value_heads": 3}, "4 attention heads do not divide into 3"),
        ({"head_dim": 15}, "15 of 15 dimensions are rotated"),
        ({"vocab_size": 0}, "at least 1"),
        ({"model_type": "arcee"}, "hidden_act 'silu' is not supported without a gate"),
        ({"hidden_size": "wide"}, "hidden_size 'wide' is not supported; it must be a number"),
        ({"rope_scaling": "yes"}, "not a complete model configuration"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama2"] | changes))
    with pytest.raises(ModelError, match=words) as caught:
        load_spec(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.message


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size", "num_attention_heads", "max_position_embeddings"])
def test_missing_fields_are_named(missing: str, tmp_path: Path) -> None:
    config = {key: value for key, value in FAMILIES["llama2"].items() if key != missing}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"'{missing}' is missing"):
        load_spec(tmp_path)


@pytest.mark.parametrize("contents", ["{", "[]", "\0\0"])
def test_broken_json_is_named(contents: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(contents)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_spec(tmp_path)


def test_missing_folder_and_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_spec(tmp_path)
    with pytest.raises(ModelError, match="is not a folder"):
        load_spec(tmp_path / "nowhere")


def _fields(config: ModelSpec) -> dict[str, object]:
    return {name: getattr(config, name) for name in ModelSpec.__slots__}
