"""Quantizes or prunes a model folder layer by layer, and writes a folder in the formats of compressed-tensors.

For calibrated methods, the inputs of each layer are computed from sample text by the quantized layers before it. Only
one layer's weights, in float32, and the hidden states of all samples are in memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.quantizer.awq import scale_for_activations
from tandem.engine.quantizer.calibrated_layer import CalibratedLayer, Product, check_calibrated, embedded, store
from tandem.engine.quantizer.calibration import CalibrationKernels, InputStatistics
from tandem.engine.quantizer.codes import QuantizedWeight
from tandem.engine.quantizer.folder_writer import FolderWriter
from tandem.engine.quantizer.folding import folds
from tandem.engine.quantizer.gptq import gptq
from tandem.engine.quantizer.rtn import round_to_nearest
from tandem.engine.quantizer.scheme import OutputScheme, choose_group
from tandem.engine.quantizer.smoothquant import smooth
from tandem.engine.quantizer.source import Source, layer_of
from tandem.engine.quantizer.sparsity import SPARSITY, check_divisible, prune_by_magnitude
from tandem.engine.weights.checkpoint import Progress
from tandem.protocol.errors import InvalidArgument


def stored_tensors(name: str, weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that replace the weight `name` (`….weight`), [N, K], in the checkpoint.

    pack-quantized: `weight_packed` int32 [N, K / 8 or K / 4], `weight_scale`, `weight_shape` int64 [2] and, with zero
    points, `weight_zero_point` int32 [N / 8, groups]. int-quantized and float-quantized: `weight` and `weight_scale`.
    Without quantization: `weight` in `scale_dtype`.
    """
    grid, (rows, columns) = weight.grid, weight.codes.shape
    if not grid.scheme.quantizes:
        return {name: weight.codes.to(scale_dtype)}
    tensors = {f"{name}_scale": grid.scales.to(scale_dtype)}
    if not grid.scheme.packed:
        codes = weight.codes.to(torch.float8_e4m3fn if grid.scheme.kind == "float" else torch.int8)
        return tensors | {name: codes}
    bits = grid.scheme.bits
    tensors |= {
        f"{name}_packed": pack_words(weight.codes, bits),
        f"{name}_shape": torch.tensor([rows, columns], dtype=torch.int64),
    }
    if grid.zeros is not None:
        tensors[f"{name}_zero_point"] = pack_words(grid.zeros.T, bits).T
    return tensors


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Pack whole numbers [N, K] of `bits` bits into words [N, ceil(K · bits / 32)] int32.

    The lowest number is -2^(bits - 1); each number is stored as its distance from the lowest one. The first number of a
    word has the lowest bits; unused bits of a row's last word are zero.
    """
    per_word = 32 // bits
    raised = codes.to(torch.int64) + 2 ** (bits - 1)
    raised = torch.nn.functional.pad(raised, (0, -codes.shape[1] % per_word)).view(len(codes), -1, per_word)
    words = (raised << torch.arange(0, 32, bits, device=codes.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


METHODS = ("rtn", "gptq", "awq", "smoothquant")
Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class QuantizationRecipe:
    """The scheme, method, group size and sparsity for quantizing a model."""

    scheme: OutputScheme
    method: str = "rtn"
    """The method, one of `METHODS`; all except `rtn` need samples."""
    group_size: int | None = None
    """The number of inputs that share a scale; None = the largest that fits, or all if the scheme has no groups."""
    sparsity: str | None = None
    """2:4, or None for weights without a pattern of zeros."""

    def __post_init__(self) -> None:
        if self.sparsity not in {None, SPARSITY}:
            raise InvalidArgument("sparsity", f"{self.sparsity!r} is not known; use {SPARSITY}.")
        if not self.scheme.quantizes and self.sparsity is None:
            raise InvalidArgument("scheme", f"none changes no weight; use it with --sparsity {SPARSITY}.")
        if not self.scheme.quantizes and self.method == "awq":
            raise InvalidArgument("method", "awq is for weights that are quantized; use gptq or rtn.")
        if self.method not in METHODS:
            raise InvalidArgument("method", f"{self.method!r} is not known; use {', '.join(METHODS)}.")
        if self.method == "smoothquant" and not self.scheme.activations:
            raise InvalidArgument(
                "method", f"smoothquant is for 8-bit activations, which {self.scheme.name} has not; use gptq or awq."
            )


@dataclass(frozen=True, slots=True)
class Quantized:
    """The folder that `quantize` wrote, and its size."""

    folder: Path
    group: int | None
    """The number of inputs that share a scale; None = all inputs of an output."""
    read_bytes: int
    written_bytes: int


def quantize(
    folder: Path,
    output: Path,
    recipe: QuantizationRecipe,
    samples: Sequence[Sequence[int]] = (),
    *,
    device: torch.device,
    progress: Progress | None = None,
) -> Quantized:
    """Quantize the linear layers of the decoder layers in `folder`, and write the model to the new folder `output`.

    Embeddings, output layer, norms, biases and routers are not quantized, but AWQ and SmoothQuant fold scales into
    norms and biases. `samples` are the token ids of the texts that calibration reads.

    Raises ModelError for a model that cannot be quantized; InvalidArgument if a setting cannot be met or `output`
    cannot be written.
    """
    with Source(folder) as source, torch.no_grad():
        inputs = {source.shape(name)[1] for name in source.products}
        if recipe.sparsity is not None:
            check_divisible(inputs)
        group = choose_group(recipe.scheme, recipe.group_size, inputs)
        if recipe.method == "rtn":
            steps = _rounded(source, recipe, group, device)
        else:
            check_calibrated(source.spec, source)
            steps = _calibrated(source, recipe, group, samples, device)
        with FolderWriter(output) as writer:
            for done, tensors in steps:
                writer.add(tensors)
                if progress is not None:
                    progress("quantizing", done)
            config = dict(source.config)
            if recipe.scheme.quantizes:
                sparse = recipe.sparsity is not None
                config["quantization_config"] = recipe.scheme.config(group, source.ignored, sparse=sparse)
            writer.finish(config, folder, source.side_files)
        return Quantized(output, group, source.total_bytes, writer.total_bytes)


def scale_dtype(scheme: OutputScheme, stored: torch.dtype) -> torch.dtype:
    """Return the dtype of scales: float32 if linear layers compute in 8 bits, else the dtype of the model."""
    return torch.float32 if scheme.activations else stored


def _rounded(
    source: Source, recipe: QuantizationRecipe, group: int | None, device: torch.device
) -> Iterator[tuple[float, Tensors]]:
    """Yield, for each tensor of the checkpoint, the completed fraction and the tensors to write."""
    products, names = set(source.products), source.names
    for number, name in enumerate(names, 1):
        tensor = source.read(name)
        tensors: Tensors = {name: tensor}
        if name in products:
            dtype = scale_dtype(recipe.scheme, tensor.dtype)
            tensors = stored_tensors(name, _rounded_weight(tensor.to(device).float(), recipe, group, dtype), dtype)
        yield number / len(names), tensors


def _calibrated(
    source: Source,
    recipe: QuantizationRecipe,
    group: int | None,
    samples: Sequence[Sequence[int]],
    device: torch.device,
) -> Iterator[tuple[float, Tensors]]:
    """Yield, for each layer, the completed fraction and the tensors to write."""
    yield 0.0, {name: source.read(name) for name in source.names if layer_of(name) is None}
    hidden, kernels = embedded(source, samples, device), CalibrationKernels()
    layers = len(source.spec.layers)
    stored = source.read(source.products[0]).dtype
    dtype = scale_dtype(recipe.scheme, stored)
    for number in range(layers):
        layer = CalibratedLayer(source, number, kernels, device)
        statistics = layer.statistics(hidden)
        if recipe.method in {"awq", "smoothquant"}:
            _fold(layer, statistics, recipe, group, stored)
        written: dict[str, Tensor] = {}
        for product in layer.products():
            quantized = _quantized(product, statistics[product.weight.data_ptr()], recipe, group, dtype)
            for name, weight in store(product, quantized).items():
                written |= stored_tensors(name, weight, dtype)
        layer.run(hidden)
        written |= {name: tensor.to(source.read(name).dtype) for name, tensor in layer.others().items()}
        yield (number + 1) / layers, written


def _fold(
    layer: CalibratedLayer,
    statistics: Mapping[int, InputStatistics],
    recipe: QuantizationRecipe,
    group: int | None,
    stored: torch.dtype,
) -> None:
    """Scale the inputs of a decoder layer's linear layers as AWQ or SmoothQuant prescribes."""
    for fold in folds(layer, stored):
        inputs = statistics[fold.weight.data_ptr()]
        if recipe.method == "smoothquant":
            smooth(fold, inputs)
        else:
            scale_for_activations(fold, inputs, recipe.scheme, group, scale_dtype(recipe.scheme, stored))


def _quantized(
    product: Product, inputs: InputStatistics, recipe: QuantizationRecipe, group: int | None, dtype: torch.dtype
) -> QuantizedWeight:
    if recipe.method == "gptq":
        return gptq(product.weight, inputs, recipe.scheme, group, dtype, sparse=recipe.sparsity is not None)
    return _rounded_weight(product.weight, recipe, group, dtype)


def _rounded_weight(
    weight: Tensor, recipe: QuantizationRecipe, group: int | None, dtype: torch.dtype
) -> QuantizedWeight:
    """Return a weight rounded to nearest, which is pruned by magnitude first if the recipe has sparsity."""
    kept = weight if recipe.sparsity is None else prune_by_magnitude(weight)
    return round_to_nearest(kept, recipe.scheme, group, dtype)
