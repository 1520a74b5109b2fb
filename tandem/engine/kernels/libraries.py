"""Chooses the kernels of libraries and compiles them in the background while the engine starts."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tandem.engine.compiled_folder import compiled_folder
from tandem.engine.config.attention import LatentShape
from tandem.engine.config.model import GroupedQueryAttention, ModelSpec
from tandem.engine.config.state_layers import GatedDeltaNet
from tandem.engine.kernels.attention.prefill_attention import (
    COMPILED_LENGTHS,
    AttentionKind,
    FlashPrefill,
    PrefillAttention,
    SdpaPrefill,
    choose_prefill_attention,
    compiled,
)
from tandem.engine.kernels.compile_apart import Job, compile_apart
from tandem.engine.kernels.latent.block_attention import (
    BlockAttention,
    FlashBlocks,
    PlainBlocks,
    choose_block_attention,
)
from tandem.engine.kernels.latent.block_attention import compiled as compiled_blocks
from tandem.engine.kernels.linear.gated_product import GatedProduct, PlainGated, choose_gated_product, why_no_library
from tandem.engine.kernels.states.chunked_delta import ChunkedDelta, choose_chunked_delta
from tandem.engine.kernels.states.chunked_delta import compiled as compiled_delta


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model and the device for which library kernels are chosen and compiled."""

    model: ModelSpec
    device: torch.device
    dtype: torch.dtype
    page_tokens: int
    pdl: bool

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """The different kinds of grouped-query attention among the model's layers."""
        attentions = (layer.attention for layer in self.model.layers)
        return tuple(
            dict.fromkeys(
                AttentionKind(attention.shape, attention.sinks)
                for attention in attentions
                if isinstance(attention, GroupedQueryAttention)
            )
        )

    @property
    def latent_shapes(self) -> tuple[LatentShape, ...]:
        """The different shapes of latent attention among the model's layers."""
        return self.model.latent_shapes

    def attention(self) -> PrefillAttention:
        """Choose and return the prefill attention, which is not compiled yet."""
        if not self.kinds:
            return SdpaPrefill()  # no layer uses it
        return choose_prefill_attention(self.device, self.dtype, self.kinds, self.page_tokens, pdl=self.pdl)

    def latent_blocks(self) -> BlockAttention:
        """Choose and return the attention of expanded latents, which is not compiled yet."""
        if not self.latent_shapes:
            return PlainBlocks()  # no layer uses it
        return choose_block_attention(self.device, self.dtype, self.latent_shapes)

    def chunked_delta(self) -> ChunkedDelta | None:
        """Choose, compile and return the kernels of long rows of Gated DeltaNet; None without such layers."""
        attentions = dict.fromkeys(layer.attention for layer in self.model.layers)
        specs = [attention for attention in attentions if isinstance(attention, GatedDeltaNet)]
        if not specs:
            return None
        chosen = choose_chunked_delta(self.device, self.dtype, specs)
        return compiled_delta(chosen, specs, self.device, self.dtype)

    def gated_product(self) -> GatedProduct:
        """Choose, compile and return the gated product."""
        widths = self.model.dense_widths | self.model.shared_widths
        if not widths:  # all layers are mixtures of experts
            return PlainGated(self.pdl)
        least_aligned = min(widths, key=lambda width: width & -width)
        return choose_gated_product(self.device, self.dtype, self.model.hidden_size, least_aligned, pdl=self.pdl)


class Libraries:
    """Futures of the library kernels: attention of prompts and of expanded latents, gated product, Gated DeltaNet."""

    def __init__(self, wanted: Wanted) -> None:
        """Start choosing and compiling at once, in a thread, and on a GPU also in separate processes.

        The choices are logged.
        """
        wait = _begin(wanted)
        thread = ThreadPoolExecutor(1, "libraries", initializer=_use, initargs=(wanted.device,))
        self.attention: Future[PrefillAttention] = thread.submit(_attention, wanted, wait)
        self.latent_blocks: Future[BlockAttention] = thread.submit(_latent_blocks, wanted, wait)
        self.gated_product: Future[GatedProduct] = thread.submit(wanted.gated_product)
        self.chunked_delta: Future[ChunkedDelta | None] = thread.submit(wanted.chunked_delta)
        thread.shutdown(wait=False)


def keep_compiled() -> None:
    """Configure flash-attn-4 and quack to keep compiled kernels on disk, and to reuse those of an earlier start.

    Must be called before either library is imported. Environment variables that are already set take precedence.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(compiled_folder("flash-attn-4")))
    os.environ.setdefault("QUACK_CACHE_DIR", str(compiled_folder("quack")))


def _begin(wanted: Wanted) -> Callable[[], None]:
    """Start compiling the libraries' kernels, and return a function that waits until they are compiled."""
    if wanted.device.type != "cuda" or wanted.dtype == torch.float32:  # no library computes float32
        return lambda: None
    keep_compiled()
    jobs = [Job(_compile_attention, (wanted, tokens)) for tokens in COMPILED_LENGTHS if wanted.kinds]
    jobs += [Job(_compile_latent_blocks, (wanted, shape)) for shape in wanted.latent_shapes]
    jobs.append(Job(_compile_product, (wanted,)))
    compiled_all = compile_apart(jobs, compiled_folder("compiled"), torch.cuda.get_device_name(wanted.device))

    def wait() -> None:
        # Imported here, while the processes compile: its packages must not be imported by two threads at once.
        why_no_library()
        compiled_all()

    return wait


def _attention(wanted: Wanted, wait: Callable[[], None]) -> PrefillAttention:
    chosen = wanted.attention()
    wait()
    return compiled(chosen, wanted.kinds, wanted.dtype, wanted.device)


def _latent_blocks(wanted: Wanted, wait: Callable[[], None]) -> BlockAttention:
    chosen = wanted.latent_blocks()
    wait()
    return compiled_blocks(chosen, wanted.latent_shapes, wanted.dtype, wanted.device)


def _compile_attention(wanted: Wanted, tokens: int) -> None:
    """Compile prefill attention. Runs in a separate process."""
    _use(wanted.device)
    attention = wanted.attention()
    if isinstance(attention, FlashPrefill):
        attention.compile(wanted.kinds, wanted.dtype, wanted.device, [tokens])


def _compile_latent_blocks(wanted: Wanted, shape: LatentShape) -> None:
    """Compile the attention of expanded latents. Runs in a separate process."""
    _use(wanted.device)
    blocks = wanted.latent_blocks()
    if isinstance(blocks, FlashBlocks):
        blocks.compile([shape], wanted.dtype, wanted.device)


def _compile_product(wanted: Wanted) -> None:
    """Compile the gated product. Runs in a separate process."""
    _use(wanted.device)
    wanted.gated_product()


def _use(device: torch.device) -> None:
    """Set the current device in a new thread or process, which does not inherit it; without an index it stays."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
