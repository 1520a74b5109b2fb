"""Products of packed weights: those of the codes and of input rounded to 8 bits, the same bits in any step."""

from collections.abc import Callable

import pytest
import torch
from llvmlite import binding, ir
from numba import types
from torch import Tensor

from tandem.engine.config.model import ExpertRouter
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.cpu import code_tiles, integer_units
from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.cpu.long_products import LONG_TOKENS
from tandem.engine.kernels.cpu.panel_weight import PanelWeight, in_panels
from tandem.engine.kernels.held_weight import CODES_A_BLOCK, multiplied_on_cpus
from tandem.engine.kernels.layers import Experts, ExpertsLayer, Linear, Norm
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tests.kernels.experts.expert_cases import moe
from tests.kernels.packed_cases import KINDS, make_packed
from tests.kernels.steps import assert_as_good

REFERENCE = ReferenceKernels()
EPS = 1e-5
COUNTS = [1, 2, 3, 4, 5, 8, 9, 15, LONG_TOKENS, 130]
CODES = [kind for kind in KINDS if kind != "fp8"]
SHAPES = [(64, 96, 64), (576, 64, 64), (576, 50, 32), (1536, 30, 128), (192, 96, 192)]
"""(k, rows, group): a last tile that is shorter than others, whole panels and not, one scale a row."""


def rounded(x: Tensor) -> Tensor:
    """Returns x as the kernels read it: 8-bit codes and a scale for each block, in float64."""
    blocks = x.double().unflatten(-1, (-1, CODES_A_BLOCK))
    # The codes are computed in float32, so that halves are rounded as the kernels do.
    largest = blocks.abs().amax(-1, keepdim=True).float()
    codes = (blocks.float() * (torch.tensor(127.0) / largest)).nan_to_num(0.0).round()
    return (codes.double() * (largest / 127).double()).flatten(-2)


class Product:
    """Random inputs of products that every dtype holds exactly, with a packed weight."""

    def __init__(self, tokens: int, packed: PackedWeight, bias: bool, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows, k = packed.shape

        def random(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator).bfloat16().double()

        self.x, self.norm, self.residual = random(tokens, k), random(k), random(tokens, rows)
        self.packed, self.bias = packed, random(rows) if bias else None

    def linear(self, kernels: Kernels, dtype: torch.dtype) -> Linear:
        bias = None if self.bias is None else self.bias.to(dtype)
        if isinstance(kernels, CpuKernels):
            return kernels.prepare(Linear(self.packed, bias))
        held = in_panels(self.packed) if multiplied_on_cpus(self.packed) else self.packed
        return Linear(held.dequantized(torch.float64).to(dtype), bias)

    def input(self, kernels: Kernels, dtype: torch.dtype, tokens: slice, ours: CpuKernels) -> Tensor:
        """Returns the input of the product that is not normed, rounded to 8 bits for the reference."""
        x = self.x[tokens].to(ours._dtype)
        return x.to(dtype) if isinstance(kernels, CpuKernels) else rounded(x).to(dtype)

    def norm_linear(
        self, kernels: Kernels, dtype: torch.dtype, ours: CpuKernels, tokens: slice = slice(None)
    ) -> Tensor:
        linear = self.linear(kernels, dtype)
        if isinstance(kernels, CpuKernels):
            return kernels.norm_linear(self.x[tokens].to(dtype), Norm(self.norm.to(dtype), EPS), linear)
        return kernels.linear(rounded(self.normed(tokens, ours)).to(dtype), linear)

    def norm_gate_up(
        self, kernels: Kernels, dtype: torch.dtype, ours: CpuKernels, tokens: slice = slice(None), how: str = "silu"
    ) -> Tensor:
        linear = self.linear(kernels, dtype)
        if isinstance(kernels, CpuKernels):
            return kernels.norm_gate_up(self.x[tokens].to(dtype), Norm(self.norm.to(dtype), EPS), linear, how)
        gate, up = REFERENCE.linear(rounded(self.normed(tokens, ours)).to(dtype), linear).chunk(2, dim=-1)
        gelu = torch.nn.functional.gelu(gate, approximate="tanh")
        return (gelu if how == "gelu_tanh" else torch.nn.functional.silu(gate)) * up

    def norm_gelu(self, kernels: Kernels, dtype: torch.dtype, ours: CpuKernels) -> Tensor:
        return self.norm_gate_up(kernels, dtype, ours, how="gelu_tanh")

    def linear_add(self, kernels: Kernels, dtype: torch.dtype, ours: CpuKernels, tokens: slice = slice(None)) -> Tensor:
        hidden = self.residual[tokens].to(dtype, copy=True)
        kernels.linear_add(self.input(kernels, dtype, tokens, ours), self.linear(kernels, dtype), hidden)
        return hidden

    def normed(self, tokens: slice, ours: CpuKernels) -> Tensor:
        """Returns RMSNorm of the input as the kernels compute it: with another last bit, another code is chosen."""
        return ours._norm(self.x[tokens].to(ours._dtype), Norm(self.norm.to(ours._dtype), EPS))


Operation = Callable[..., Tensor]
OPERATIONS: list[Operation] = [Product.norm_linear, Product.norm_gate_up, Product.linear_add]


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize("operation", [*OPERATIONS, Product.norm_gelu])
def test_products_are_those_of_the_codes(
    operation: Operation, kind: str, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    ours, baseline, exact = [], [], []
    for k, rows, group in SHAPES:
        packed = make_packed(kind, (rows, k), group)
        for number, tokens in enumerate(COUNTS):
            product = Product(tokens, packed, bias=number % 2 == 1, seed=tokens)
            ours.append(operation(product, kernels, dtype, kernels).flatten())
            baseline.append(operation(product, REFERENCE, dtype, kernels).flatten())
            exact.append(operation(product, REFERENCE, torch.float64, kernels).flatten())
    # NVFP4 is a plain weight on CPUs, and its widely spread scales leave the comparison to a few large outputs.
    assert_as_good(torch.cat(ours), torch.cat(baseline), torch.cat(exact), 3 if kind == "nvfp4" else 2)


# NVFP4 is a plain weight on CPUs, which PyTorch multiplies in an order that depends on the number of rows and the CPU.
@pytest.mark.parametrize("kind", [kind for kind in CODES if kind != "nvfp4"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_row_is_the_same_alone_and_in_any_step(
    operation: Operation, kind: str, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    """Prompts included: a product of packed weights has one order of sums for any number of tokens."""
    product = Product(LONG_TOKENS + 9, make_packed(kind, (64, 192), 64), bias=True)
    together = operation(product, kernels, dtype, kernels)
    for tokens in (slice(0, 1), slice(3, 4), slice(0, 3), slice(5, 12), slice(2, 10), slice(1, 50)):
        assert torch.equal(operation(product, kernels, dtype, kernels, tokens), together[tokens])


@pytest.mark.parametrize("tokens", [1, 9, 60])
def test_the_number_of_threads_changes_nothing(tokens: int, kernels: CpuKernels, dtype: torch.dtype) -> None:
    alone = CpuKernels(dtype, threads=1)
    product = Product(tokens, make_packed("int4_offsets", (192, 576), 32), bias=False)
    for operation in OPERATIONS:
        assert torch.equal(operation(product, alone, dtype, alone), operation(product, kernels, dtype, kernels))


@pytest.mark.parametrize(("kind", "shape", "group"), [("fp8", (32, 64), 64), ("int8", (32, 48), 16)])
def test_what_cannot_be_multiplied_as_codes_is_dequantized(
    kind: str, shape: tuple[int, int], group: int, kernels: CpuKernels, dtype: torch.dtype
) -> None:
    packed = make_packed(kind, shape, group)
    assert torch.equal(kernels.prepare(Linear(packed)).weight, packed.dequantized(dtype))


@pytest.mark.parametrize("kind", CODES)
@pytest.mark.parametrize(("rows", "k", "group"), [(50, 576, 32), (64, 192, 192)])
def test_panels_keep_the_values(kind: str, rows: int, k: int, group: int) -> None:
    packed = make_packed(kind, (3, rows, k), group)
    exact = packed.dequantized(torch.float64)
    panels = in_panels(packed)
    assert panels.shape == packed.shape
    assert len(panels) == 3
    # Offsets, and with them all values, are rounded to eleven bits of the row's largest number.
    assert (panels.dequantized(torch.float64) - exact).abs().max() <= exact.abs().max() / 512
    chosen = torch.tensor([3, 0, 49, 3])
    assert torch.equal(panels[1].rows(chosen).dequantized(torch.float64), panels.dequantized(torch.float64)[1, chosen])


def test_a_nan_stays_in_its_row_and_a_zero_row_is_zero(kernels: CpuKernels, dtype: torch.dtype) -> None:
    linear = kernels.prepare(Linear(make_packed("int8", (32, 64), 32)))
    x = torch.randn(6, 64).to(dtype)
    clean = kernels.linear(x, linear)
    x[4, 7], x[2] = float("nan"), 0.0
    result = kernels.linear(x, linear)
    assert result[4].isnan().all()
    assert (result[2] == 0).all()
    others = [0, 1, 3, 5]
    assert torch.equal(result[others], clean[others])


def test_experts_with_packed_weights(kernels: CpuKernels, dtype: torch.dtype) -> None:
    spec = moe(ExpertRouter(), experts=3, top_k=2)
    torch.manual_seed(0)
    packed = {"gate_up": make_packed("int4", (3, 64, 64), 32), "down": make_packed("int8", (3, 64, 32), 32, seed=1)}

    def experts(gate_up: object, down: object) -> Experts:
        router = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
        return Experts(router, None, None, gate_up, None, down, None, None, None, None)  # type: ignore[arg-type]

    norm, slots = Norm(torch.ones(64).to(dtype), EPS), torch.arange(5)
    hidden = torch.randn(5, 64).to(dtype)
    ours, theirs = hidden.clone(), hidden.clone()
    prepared = kernels.prepare_experts(experts(**packed))
    assert isinstance(prepared.gate_up, PanelWeight)
    kernels.experts(ours, ExpertsLayer(norm, prepared, spec), slots, ours)
    plain = experts(**{name: weight.dequantized(dtype) for name, weight in packed.items()})
    REFERENCE.experts(theirs, ExpertsLayer(norm, plain, spec), slots, theirs)
    added = (theirs - hidden).double()
    assert ((ours - hidden).double() - added).norm() <= 0.03 * added.norm()


@pytest.mark.parametrize("feature", ["avx512vnni", "avxvnni"])
@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_are_multiplied_where_the_host_can(feature: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles for a host with VNNI; what it computes is tested on one."""
    for module in (code_tiles, integer_units):
        monkeypatch.setattr(module, "multiplies_bytes", lambda: feature)
    module = ir.Module()
    kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 13)
    function = ir.Function(module, kind, "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    code_tiles._code_tile(bits, False, 1).call(builder, types.uint16, list(function.args))
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    cpu, features = ("znver4", "") if feature == "avx512vnni" else ("haswell", "+avxvnni")
    target = binding.Target.from_triple("x86_64-unknown-linux-gnu")
    assembly = target.create_target_machine(cpu=cpu, features=features).emit_assembly(parsed)
    assert assembly.count("vpdpbusd") == (8 if feature == "avx512vnni" else 16)
