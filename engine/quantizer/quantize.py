"""Quantizes a model folder: reads it tensor by tensor, and writes a folder in compressed-tensors' formats."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.quantizer.compressed_tensors import stored_tensors
from engine.quantizer.folder_writer import FolderWriter
from engine.quantizer.rtn import round_to_nearest
from engine.quantizer.scheme import OutputScheme, choose_group
from engine.quantizer.source import Source
from engine.weights.checkpoint import Progress

METHODS = ("rtn",)


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was written."""

    folder: Path
    group: int | None
    """Inputs that share a scale; None = all of an output."""
    read_bytes: int
    written_bytes: int


def quantize(
    folder: Path,
    output: Path,
    scheme: OutputScheme,
    *,
    group_size: int | None = None,
    device: torch.device,
    progress: Progress | None = None,
) -> Quantized:
    """Writes `folder` with the weights of its layers' products quantized to `output`, which must not exist.

    Embeddings, output layer, norms, biases and routers stay as they are. `group_size` None = the largest that fits.
    Raises ModelError for a model that cannot be quantized, InvalidArgument for a setting that cannot be met.
    """
    with Source(folder) as source:
        products = set(source.products)
        group = choose_group(scheme, group_size, {source.shape(name)[1] for name in products})
        read_bytes = 0
        with FolderWriter(output) as writer:
            for number, name in enumerate(source.names):
                tensor = source.read(name)
                read_bytes += tensor.nbytes
                if name in products:
                    dtype = scale_dtype(scheme, tensor.dtype)
                    rounded = round_to_nearest(tensor.to(device).float(), scheme, group, dtype)
                    writer.add(stored_tensors(name, rounded, dtype))
                else:
                    writer.add({name: tensor})
                if progress is not None:
                    progress("quantizing", (number + 1) / len(source.names))
            config = {**source.config, "quantization_config": scheme.config(group, source.ignored)}
            writer.finish(config, source.side_files)
        return Quantized(output, group, read_bytes, writer.total_bytes)


def scale_dtype(scheme: OutputScheme, stored: torch.dtype) -> torch.dtype:
    """Returns the dtype of scales: the model's where products compute in it, float32 where they compute in 8 bits."""
    return torch.float32 if scheme.activations else stored
