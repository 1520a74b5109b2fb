"""What the families with state layers refuse, and how a recurrence is divided into chunks."""

import pytest
import torch

from tandem.engine.kernels.states.recurrence import recurrence
from tandem.engine.models.load_spec import parse_spec
from tandem.protocol.errors import ModelError
from tests.factories import FAMILIES

REFUSED = [
    ("qwen3_next", {"linear_num_value_heads": 3}, "not a multiple of linear_num_key_heads"),
    ("qwen3_next", {"linear_conv_kernel_dim": 1}, "must be at least 2"),
    ("qwen3_5", {"layer_types": ["mamba"] * 4}, "layer type 'mamba' is not supported"),
    ("nemotron_h", {"layers_block_type": ["linear_attention", "swa"]}, "block type 'swa'"),
    ("nemotron_h_experts", {"hybrid_override_pattern": "M*EE"}, "only after a block with attention"),
    ("nemotron_h_experts", {"moe_latent_size": 0}, "moe_latent_size 0 is not supported; it must be at least 1"),
    ("nemotron_h_experts", {"mlp_bias": True}, "mlp_bias is not supported for experts"),
    ("nemotron_h", {"layers_block_type": ["mlp", "full_attention"]}, "only after a block with attention"),
    ("nemotron_h", {"n_groups": 3}, "do not divide into 3 groups"),
    ("kimi_linear", {"layer_types": ["linear_attention"]}, "must name 3 layers"),
    ("kimi_linear", {"mla_use_nope": False}, "has no position embedding"),
    ("kimi_linear", {"moe_router_activation_func": "softmax"}, "'softmax' is not supported"),
    ("bamba", {"mamba_n_groups": 3}, "do not divide into 3 groups"),
    ("bamba", {"mamba_d_head": 16}, "are not the 64 of mamba_expand"),
    ("bamba", {"hidden_act": "gelu_new"}, "silu is"),
    ("bamba", {"time_step_limit": [0.0, 1.0]}, "maximum must be infinite"),
    ("granitemoehybrid", {"layer_types": ["mamba"]}, "must name 3 layers"),
    ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, "each full_attention or conv"),
    ("lfm2_moe", {"num_experts_per_tok": 9}, "cannot be chosen from 8"),
    ("lfm2", {"conv_L_cache": 1}, "must be at least 2"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_a_config_with_unsupported_state_layers_is_refused(
    family: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        parse_spec(FAMILIES[family] | changes)


@pytest.mark.parametrize("channels", [1, 8], ids=["one decay", "a decay per channel"])
@pytest.mark.parametrize("delta", [False, True], ids=["without the delta rule", "with the delta rule"])
def test_chunks_compute_the_recurrence_of_single_tokens(delta: bool, channels: int) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)

    q, k, v, state = random(150, 8), random(150, 8), random(150, 5), random(8, 5)
    k = k / k.norm(dim=-1, keepdim=True)
    log_decay, step = -random(150, channels).abs(), random(150).sigmoid()
    out, last = recurrence(q, k, v, log_decay, step if delta else None, state)
    for token in range(150):
        state = state * log_decay[:, :, token, :, None].exp()
        key, value = k[:, :, token, :, None], v[:, :, token, None]
        if delta:
            value = step[:, :, token, None, None] * (value - key.mT @ state)
        state = state + key @ value
        torch.testing.assert_close(out[:, :, token], (q[:, :, token, None] @ state).squeeze(2))
    torch.testing.assert_close(last, state)
