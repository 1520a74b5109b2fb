"""Counts the tokens that chose each expert, by group of layers, to show whether routers balance the load."""

import threading

import torch
from torch import Tensor

from tandem.engine.config.model import MixtureOfExperts, ModelSpec

LAYER_GROUPS = ("first", "middle", "last")
"""The thirds of a model's layers; separate counters for each layer would be tens of thousands of time series."""


class ExpertTokens:
    """Counters of tokens per expert on the model's device, incremented by its kernels. Any thread may read them."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        """Allocate the counters; a model without experts has none."""
        self._experts = [
            layer.feed_forward.experts if isinstance(layer.feed_forward, MixtureOfExperts) else 0
            for layer in spec.layers
        ]
        self._counters = torch.zeros(len(LAYER_GROUPS), max(self._experts), dtype=torch.int64, device=device)
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None
        self._host: Tensor | None = None

    def of_layer(self, layer: int) -> Tensor | None:
        """Return the counters [experts] int64 that a layer's kernels increment; None if the layer has no experts."""
        experts = self._experts[layer]
        return self._counters[self._group(layer), :experts] if experts else None

    def read(self) -> dict[tuple[str, ...], float]:
        """Return the number of tokens by layer group and expert number; empty for a model without experts.

        Steps do not wait for the call: on a GPU the counters are copied on another stream, so some may lack the tokens
        of a running step.
        """
        if not self._counters.numel():
            return {}
        rows = self._copied()
        groups = sorted({self._group(layer) for layer, experts in enumerate(self._experts) if experts})
        return {(LAYER_GROUPS[group], str(expert)): n for group in groups for expert, n in enumerate(rows[group])}

    def reset(self) -> None:
        """Set all counters to 0; called after the trial steps at the start."""
        with torch.inference_mode():
            self._counters.zero_()

    def _group(self, layer: int) -> int:
        return layer * len(LAYER_GROUPS) // len(self._experts)

    def _copied(self) -> list[list[int]]:
        if not self._counters.is_cuda:
            return self._counters.tolist()
        with self._lock:
            if self._stream is None or self._host is None:
                self._stream = torch.cuda.Stream(self._counters.device)  # type: ignore[no-untyped-call]
                self._host = torch.empty(self._counters.shape, dtype=torch.int64, pin_memory=True)
            with torch.cuda.stream(self._stream), torch.inference_mode():
                self._host.copy_(self._counters, non_blocking=True)
            self._stream.synchronize()
            return self._host.tolist()
