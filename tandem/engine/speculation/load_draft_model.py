"""Loads a draft model: a separate engine next to the target's, with a share of the KV memory."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from tandem.engine.cache.paged_cache import PagedCache, page_bytes
from tandem.engine.config import EngineConfig
from tandem.engine.config.kv import kv_groups
from tandem.engine.config.model import ModelSpec
from tandem.engine.device import parse_device, parse_dtype, parse_kv_dtype
from tandem.engine.kernels.base import is_cpu
from tandem.engine.memory import kv_cache_bytes
from tandem.engine.model_sizes import matrix_bytes
from tandem.engine.models.allocation import weight_bytes
from tandem.engine.models.load_spec import load_spec
from tandem.engine.speculation.draft_model import DraftRunner
from tandem.protocol.errors import ModelError
from tandem.settings.model import ModelSettings
from tandem.tokenizers.tokenizer_formats import has_tokenizer, load_tokenizer

log = logging.getLogger(__name__)

_ITEM_BYTES = 2
"""The assumed bytes per weight when the sizes of two models are compared."""
_ROWS_PER_REQUEST = 2
"""The number of rows per request in the first step of a draft, if the whole previous draft was accepted."""


class LoadedDraft(DraftRunner, Protocol):
    """The interface of a loaded draft model.

    A `DraftRunner` that also has the properties from which its memory is computed: spec, dtype and KV cache.
    """

    @property
    def spec(self) -> ModelSpec:
        """The spec of the draft model."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights that are not quantized."""

    @property
    def cache(self) -> PagedCache:
        """The KV cache of the draft model."""


LoadModel = Callable[[EngineConfig], LoadedDraft]
"""A function that loads an engine for a draft model."""


def check_draft_model(folder: Path, spec: ModelSpec, tokenizer: Path) -> None:
    """Check that a draft model's vocabulary equals the target's. Raises ModelError, which says how they differ.

    `tokenizer` is the folder of the target's tokenizer. A draft model needs no tokenizer: without one only the sizes of
    the vocabularies are compared.
    """
    draft = load_spec(folder)
    if draft.vocab_size != spec.vocab_size:
        raise ModelError(
            f"{folder} has a vocabulary of {draft.vocab_size} tokens, the model one of {spec.vocab_size};"
            " a draft model must have the same tokens."
        )
    if draft.has_states:
        raise ModelError(f"{folder} has state layers, which a draft model must not have; choose another draft model.")
    if has_tokenizer(folder) and has_tokenizer(tokenizer):
        draft_vocabulary, target_vocabulary = (load_tokenizer(path).inner.get_vocab() for path in (folder, tokenizer))
        if draft_vocabulary != target_vocabulary:
            raise ModelError(f"{folder} has another tokenizer than {tokenizer}; a draft model must have the same.")
    if matrix_bytes(draft, _ITEM_BYTES) >= matrix_bytes(spec, _ITEM_BYTES):
        log.warning("The draft model %s has as many bytes as the model itself: its drafts hardly pay.", folder)


def draft_path(config: EngineConfig) -> Path:
    """Return the folder of the weights that propose draft tokens: that of `config.draft`, or the model's own."""
    return config.draft or config.served.model


def draft_config(config: EngineConfig) -> EngineConfig:
    """Return the settings of the draft model's engine, derived from the target's; the caller sets `kv_cache_bytes`."""
    return replace(
        config,
        # The folder of the draft model may have no tokenizer.
        served=ModelSettings(draft_path(config), tokenizer=config.served.tokenizer_folder),
        draft=None,
        mtp=False,
        loras=(),
        runtime_loras=False,
        max_model_len=None,
        quantization=None,
        kv_cache_dtype="auto",
        draft_graphs=False,
        max_batch_requests=_ROWS_PER_REQUEST * config.batch_requests,
    )


def draft_model_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the size of the draft model's weights in bytes."""
    settings = draft_config(config)
    draft = load_spec(settings.served.model)
    return weight_bytes(draft, parse_dtype(settings, device, draft), on_cpu=is_cpu(device))


def kv_share(config: EngineConfig, spec: ModelSpec, page_tokens: int, device: torch.device) -> float:
    """Return the share of the KV memory that the draft model needs to hold as many tokens as the target."""
    settings = draft_config(config)
    draft = load_spec(settings.served.model)
    dtypes = parse_kv_dtype(config, device, spec), parse_kv_dtype(settings, device, draft)
    return share_of((spec, dtypes[0]), (draft, dtypes[1]), page_tokens)


def share_of(target: tuple[ModelSpec, torch.dtype], draft: tuple[ModelSpec, torch.dtype], page_tokens: int) -> float:
    """Return the share of the KV memory that the draft model needs to hold as many tokens as the target.

    `target` and `draft` are the spec of a model and the dtype of its KV.
    """
    target_bytes, draft_bytes = (
        page_bytes(spec, page_tokens, dtype) * len(kv_groups(spec)) for spec, dtype in (target, draft)
    )
    return draft_bytes / (target_bytes + draft_bytes)


def memory_of(runner: LoadedDraft) -> dict[str, int]:
    """Return the bytes of a model's `weights` (matrices only) and of its `kv` pages."""
    weights = matrix_bytes(runner.spec, runner.dtype.itemsize, on_cpu=is_cpu(runner.cache.device))
    return {"weights": weights, "kv": runner.cache.storage.nbytes}


def load_draft_model(
    load: LoadModel, config: EngineConfig, spec: ModelSpec, page_tokens: int, total: int | None
) -> LoadedDraft:
    """Load the draft model of `config` with `load`, on the device of the target.

    `total` is the KV memory of both models in bytes; None = the memory left on a GPU that already has the weights of
    the target. Raises ModelError if the model cannot be served or has another vocabulary.
    """
    check_draft_model(draft_path(config), spec, config.served.tokenizer_folder)
    device = parse_device(config.device)
    if total is None:
        total = kv_cache_bytes(device, config.gpu_memory_fraction, draft_model_bytes(config, device))
    share = kv_share(config, spec, page_tokens, device)
    runner = load(replace(draft_config(config), kv_cache_bytes=int(total * share)))
    log.info("Draft model %s: %d KV pages", draft_path(config), runner.cache.pages)
    return runner
