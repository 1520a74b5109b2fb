"""The checkpoint to quantize: reads its tensors one at a time, and lists the weights of linear layers."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import safe_open
from torch import Tensor

from tandem.engine.config.model import GroupedQueryAttention, ModelSpec
from tandem.engine.models.load_spec import text_part
from tandem.engine.weights.checkpoint import check_model, weight_files
from tandem.protocol.errors import ModelError

_PRODUCT = re.compile(r"\.(?:(?:q|k|v|o|qkv|gate|up|down|gate_up)_proj|experts\.\d+\.w[123])\.weight$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_SIDE_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
_OWN_FILES = ("config.json", "model.safetensors.index.json")


class Source:
    """A model folder in Hugging Face layout, used as a context manager that keeps the files open."""

    def __init__(self, folder: Path) -> None:
        """Open a model folder. Raises ModelError if it cannot be served, or if its weights cannot be quantized."""
        self.folder = folder
        self.spec: ModelSpec = check_model(folder)
        self.config: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._paths = weight_files(folder)
        self._files: list[Any] = [safe_open(file, "pt") for file in self._paths]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - no dict
        self._check()

    def __enter__(self) -> "Source":
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self._files.clear()
        self._file_of.clear()

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in the order of the layers."""
        return sorted(self._file_of, key=lambda name: (layer_of(name) if layer_of(name) is not None else -1, name))

    @property
    def products(self) -> list[str]:
        """The names of the weights to quantize."""
        return [name for name in self.names if _PRODUCT.search(name) and layer_of(name) is not None]

    @property
    def ignored(self) -> list[str]:
        """The linear modules that are not quantized: the output layer, and the routers of mixtures of experts."""
        routers = (".gate.weight", ".shared_expert_gate.weight")
        return ["lm_head", *(name.removesuffix(".weight") for name in self.names if name.endswith(routers))]

    @property
    def total_bytes(self) -> int:
        """The size of all weight files in bytes."""
        return sum(file.stat().st_size for file in self._paths)

    @property
    def side_files(self) -> list[Path]:
        """The files to copy unchanged into the quantized folder, relative to this folder.

        They are the tokenizer, chat templates, generation settings, and the code of tokenizers that transformers does
        not include.
        """
        files = [file for file in self.folder.iterdir() if file.suffix in _SIDE_FILES]
        files += [*self.folder.glob("tokenization_*.py"), *self.folder.glob("additional_chat_templates/*.jinja")]
        kept = [file.relative_to(self.folder) for file in files if file.is_file()]
        return sorted(file for file in kept if file.name not in _OWN_FILES)

    def read(self, name: str) -> Tensor:
        """Return a tensor in host memory, in its stored dtype."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def _check(self) -> None:
        kinds = {type(layer.attention) for layer in self.spec.layers}
        if self.spec.quantization is not None:
            raise ModelError(f"{self.folder} is quantized already; quantize the model it was made from.")
        if text_part(self.config) is not self.config:
            raise ModelError(f"{self.folder} is a multimodal model; only models of text alone can be quantized.")
        stacked = any(
            name.endswith((".experts.gate_up_proj", ".experts.down_proj", ".input_linear.weight"))
            for name in self._file_of
        )
        if kinds != {GroupedQueryAttention} or stacked:
            what = "experts that are stored stacked" if stacked else "latent attention"
            raise ModelError(f"{self.folder} ({self.spec.architecture}) has {what}, which cannot be quantized.")


def layer_of(name: str) -> int | None:
    """Return the number of a tensor's layer; None if it belongs to no layer."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])
