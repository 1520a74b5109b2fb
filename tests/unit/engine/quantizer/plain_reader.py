"""Reads a compressed-tensors folder by itself, from the description of the format alone; shares no code with Tandem."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def read_plainly(folder: Path) -> dict[str, Tensor]:
    """Returns all weights of a folder by their names, dequantized to float32."""
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    bits, symmetric = group["weights"]["num_bits"], group["weights"]["symmetric"]
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_packed"):
            base = name.removesuffix("_packed")
            rows, columns = stored[f"{base}_shape"].tolist()
            codes = _unpacked(tensor, bits)[:rows, :columns] - 2 ** (bits - 1)
            scale = stored[f"{base}_scale"].float()
            if not symmetric:
                zeros = _unpacked(stored[f"{base}_zero_point"].T, bits).T[:rows] - 2 ** (bits - 1)
                codes = codes - zeros.repeat_interleave(columns // scale.shape[1], 1)
            weights[base] = codes * scale.repeat_interleave(columns // scale.shape[1], 1)
        elif f"{name}_scale" in stored:
            weights[name] = tensor.float() * stored[f"{name}_scale"]
        elif not name.endswith(("_scale", "_shape", "_zero_point")):
            weights[name] = tensor.float()
    return weights


def write_plain_copy(folder: Path, copy: Path) -> Path:
    """Writes the dequantized weights as a folder of float32, which any engine loads."""
    copy.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            shutil.copyfile(file, copy / file.name)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in read_plainly(folder).items()}, copy / "model.safetensors")
    return copy


def _unpacked(words: Tensor, bits: int) -> Tensor:
    columns = [(words >> shift) & (2**bits - 1) for shift in range(0, 32, bits)]
    return torch.stack(columns, -1).flatten(1).float()
