"""Random mixtures of experts between NaN, whose tokens choose the same experts in every dtype."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tandem.engine.config.model import ExpertRouter, MixtureOfExperts
from tandem.engine.kernels.experts.expert_tiles import ExpertTile
from tandem.engine.kernels.experts.triton_experts import ExpertKernels
from tandem.engine.kernels.layers import Experts, ExpertsLayer, Linear, Norm, with_linears
from tandem.engine.kernels.reference import ReferenceKernels, choose_experts, rms_norm, router_logits
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.product_cases import DEVICE, EPS, guarded, guards_of

REFERENCE = ReferenceKernels()
OURS = ExpertKernels(overlaps_launches())
_NOISE, _DRAWS = 0.03, 8
"""Logits that are so far from each other are in the same order in every dtype."""


@dataclass(frozen=True)
class ExpertCase:
    """Inputs in float64: hidden [T, H]; slots [T] are -1 for padding tokens, whose hidden state is NaN."""

    spec: MixtureOfExperts
    hidden: Tensor
    norm: Tensor
    experts: Experts
    slots: Tensor

    @property
    def valid(self) -> Tensor:
        return self.slots >= 0

    def of(self, tokens: slice) -> "ExpertCase":
        return replace(self, hidden=self.hidden[tokens], slots=self.slots[tokens])

    def chosen(self) -> Tensor:
        """Returns the experts of the tokens that are no padding [any, top_k]."""
        return choose(self.spec, self.experts, self.hidden[self.valid], self.norm)


def moe(
    router: ExpertRouter, *, experts: int = 8, top_k: int = 2, width: int = 24, activation: str = "silu",
    bias: bool = False, shared_width: int = 0, shared_gate: bool = False, latent: int = 0,
) -> MixtureOfExperts:  # fmt: skip
    return MixtureOfExperts(experts, top_k, width, router, activation, bias, shared_width, shared_gate, latent=latent)


def make_case(spec: MixtureOfExperts, tokens: int, hidden: int = 40, *, padding: bool = False, seed: int = 0,
              device: torch.device | str = "cpu") -> ExpertCase:  # fmt: skip
    """Returns a case; with `padding` every third token from the second on is none."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*sizes: int, scale: float = 1.0) -> Tensor:
        numbers = torch.randn(*sizes, generator=generator, device=device) * scale * 256
        return numbers.round().clamp(-1020, 1020).bfloat16().double() / 256

    experts, width, shared = spec.experts, spec.width, spec.shared_width
    size, latent = spec.outer(hidden), spec.latent
    inner, outer, stacked = hidden**-0.5, width**-0.5, 2 if spec.gated else 1
    made = Experts(
        router=random(experts, hidden, scale=3 * inner),
        router_bias=random(experts) if spec.router.bias else None,
        choice_bias=random(experts, scale=0.2) if spec.router.choice_bias else None,
        gate_up=random(experts, stacked * width, size, scale=2 * size**-0.5),
        gate_up_bias=random(experts, stacked * width) if spec.bias else None,
        down=random(experts, size, width, scale=outer),
        down_bias=random(experts, size) if spec.bias else None,
        shared_gate_up=Linear(random(stacked * shared, hidden, scale=inner)) if shared else None,
        shared_down=Linear(random(hidden, shared, scale=shared**-0.5)) if shared else None,
        shared_gate=random(1, hidden, scale=inner) if spec.shared_gate else None,
        router_norm=random(hidden) if spec.router.own_norm else None,
        expert_scales=random(experts) if spec.router.expert_scales else None,
        latent_down=Linear(random(latent, hidden, scale=inner)) if latent else None,
        latent_up=Linear(random(hidden, latent, scale=latent**-0.5)) if latent else None,
    )
    norm = random(hidden)
    candidates = random(8 * tokens + 64, hidden)
    stable = candidates[_is_stable(spec, made, candidates, norm, generator)][:tokens]
    assert len(stable) == tokens
    slots = torch.arange(tokens, device=device)
    if padding:
        slots[1::3] = -1
        stable[1::3] = float("nan")
    return ExpertCase(spec, stable, norm, made, slots)


def of_ranks(case: ExpertCase, ranks: int) -> list[ExpertCase]:
    """Returns the case of each of several ranks that have some of the experts as a whole."""
    count, cases = case.spec.experts // ranks, []
    for number in range(ranks):
        own = slice(number * count, (number + 1) * count)
        names = ("gate_up", "gate_up_bias", "down", "down_bias")
        parts = {name: weight[own] for name in names if (weight := getattr(case.experts, name)) is not None}
        spec = replace(case.spec, local=range(own.start, own.stop))
        cases.append(replace(case, spec=spec, experts=replace(case.experts, **parts)))
    return cases


def choose(spec: MixtureOfExperts, experts: Experts, hidden: Tensor, norm: Tensor, noise: float | Tensor = 0) -> Tensor:
    norm = norm if experts.router_norm is None else experts.router_norm
    logits = router_logits(rms_norm(hidden, norm, EPS), experts.router, experts.router_bias)
    return choose_experts(logits + noise, experts.choice_bias, spec)[1].sort(dim=1).values


def _is_stable(
    spec: MixtureOfExperts, experts: Experts, hidden: Tensor, norm: Tensor, generator: torch.Generator
) -> Tensor:
    """Returns the tokens that choose the same experts when their logits change a little."""
    usual = choose(spec, experts, hidden, norm)
    stable = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    for _ in range(_DRAWS):
        noise = torch.randn(len(hidden), spec.experts, generator=generator, device=hidden.device).double() * _NOISE
        stable &= (choose(spec, experts, hidden, norm, noise) == usual).all(dim=1)
    return stable


def experts_as(experts: Experts, dtype: torch.dtype, counter: Tensor | None = None, *, guard: bool = False) -> Experts:
    """Returns the experts in `dtype`, with `guard` on the device; the choice's bias stays wider, as in the engine."""

    def convert(tensor: Tensor | None, kind: torch.dtype) -> Tensor | None:
        if tensor is None:
            return None
        return guarded(tensor, kind) if guard else tensor.to(kind)

    wide = torch.promote_types(dtype, torch.float32)
    names = ("router", "router_bias", "gate_up", "gate_up_bias", "down", "down_bias", "shared_gate", "router_norm")
    converted = {name: convert(getattr(experts, name), dtype) for name in names}
    converted |= {name: convert(getattr(experts, name), wide) for name in ("choice_bias", "expert_scales")}
    device = DEVICE if guard else experts.router.device
    experts = with_linears(experts, lambda linear: Linear(linear.weight.to(device, dtype)))
    return replace(experts, tokens=counter, **converted)


def reference_run(case: ExpertCase, dtype: torch.dtype) -> Tensor:
    """Returns the hidden states after plain PyTorch's experts, without padding."""
    hidden = case.hidden[case.valid].to(dtype)
    experts = experts_as(case.experts, dtype)
    layer = ExpertsLayer(Norm(case.norm.to(dtype), EPS), experts, case.spec)
    REFERENCE.experts(hidden, layer, case.slots[case.valid], hidden)
    return hidden


def run(case: ExpertCase, dtype: torch.dtype, tile: ExpertTile | None = None, counter: Tensor | None = None) -> Tensor:
    """Returns the hidden states after the routed experts under test, with NaN around all tensors."""
    hidden, norm = guarded(case.hidden, dtype), Norm(guarded(case.norm, dtype), EPS)
    experts = experts_as(case.experts, dtype, counter, guard=True)
    slots = case.slots.to(DEVICE)
    layer = ExpertsLayer(norm, experts, case.spec)
    if experts.latent_down is None or experts.latent_up is None:
        OURS.add(hidden, layer, slots, hidden, tile)
    else:
        mixed = guarded(torch.zeros(len(hidden), case.spec.latent), dtype)
        OURS.add(hidden, layer, slots, mixed, tile, project=partial(REFERENCE.linear, linear=experts.latent_down))
        REFERENCE.linear_add(mixed, experts.latent_up, hidden)
    assert guards_of(hidden).isnan().all()
    return hidden.to(case.hidden.device)
