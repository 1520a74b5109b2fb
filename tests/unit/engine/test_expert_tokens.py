"""The counters of experts: by third of the layers, for models with and without experts."""

import torch

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import (
    DenseFeedForward,
    ExpertRouter,
    FeedForward,
    GroupedQueryAttention,
    LayerSpec,
    MixtureOfExperts,
    ModelSpec,
)
from tandem.engine.expert_tokens import ExpertTokens
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.weights.random_weights import fill_randomly

CPU = torch.device("cpu")
DENSE = DenseFeedForward(16)


def model(*feed_forward: FeedForward) -> ModelSpec:
    attention = GroupedQueryAttention(AttentionShape(2, 1, 8, 8**-0.5), rope=None)
    return ModelSpec(
        architecture="Made", vocab_size=32, hidden_size=16, layers=tuple(LayerSpec(attention, f) for f in feed_forward),
        norm_eps=1e-5, max_context=64, tied_embeddings=False, eos_token_ids=(0,), dtype=None,
    )  # fmt: skip


def mixture(experts: int = 4) -> MixtureOfExperts:
    return MixtureOfExperts(experts, 2, 8, ExpertRouter())


def test_a_model_without_experts_counts_nothing() -> None:
    tokens = ExpertTokens(model(DENSE, DENSE), CPU)
    assert tokens.of_layer(0) is None
    assert tokens.read() == {}
    tokens.reset()


def test_layers_of_a_third_share_counters() -> None:
    tokens = ExpertTokens(model(DENSE, *[mixture()] * 5), CPU)
    assert tokens.of_layer(0) is None
    for layer in (1, 2, 3):
        counter = tokens.of_layer(layer)
        assert counter is not None
        counter += 1
    counts = tokens.read()
    assert counts == {(group, str(e)): n for group, n in (("first", 1), ("middle", 2), ("last", 0)) for e in range(4)}
    tokens.reset()
    assert not any(tokens.read().values())


def test_a_model_counts_the_experts_of_its_steps() -> None:
    spec = model(DENSE, mixture(), mixture())
    with torch.inference_mode():
        parameters = allocate_parameters(spec, torch.float32, CPU)
        fill_randomly(parameters)
        decoder = DecoderModel(spec, parameters, ReferenceKernels(), spec.max_context)
        for layer in decoder._layers:
            layer.feed_forward.add(torch.randn(5, 16), torch.tensor([3, -1, 4, 5, -1]), None)
    counts = decoder.expert_tokens.read()
    assert {labels[0] for labels in counts} == {"middle", "last"}
    assert sum(counts.values()) == 2 * 3 * 2
