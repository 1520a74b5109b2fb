"""Pages of one part: sizes, layout of the transfer, and checksums of a model with latent attention."""

import torch

from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.page_words import as_words
from tandem.engine.cache.paged_cache import PagedCache, cache_bytes
from tandem.engine.config.attention import LatentShape
from tandem.engine.config.model import DenseFeedForward, LatentAttention, LayerSpec, ModelSpec
from tandem.engine.config.rope import RopeConfig
from tandem.engine.kernels.rowwise.triton_checksum import reference_sums
from tandem.engine.model_sizes import kv_bytes_per_token
from tandem.worker.transfer import layout_of


def latent_spec(layers: int, heads: int) -> ModelSpec:
    shape = LatentShape(heads, latent=512, rope=64, nope=128, v_dim=128, scale=192**-0.5)
    attention = LatentAttention(shape, RopeConfig(theta=10000.0), query_rank=None, norm_eps=1e-6)
    layer = LayerSpec(attention, DenseFeedForward(96))
    return ModelSpec("DeepseekV2ForCausalLM", 100, 64, (layer,) * layers, 1e-6, 4096, False, (0,), None)


def test_bytes_of_a_token() -> None:
    """DeepSeek-V2-Lite has 27 layers, V3 61; bfloat16."""
    assert kv_bytes_per_token(latent_spec(27, 16), 2) == 31_104
    assert kv_bytes_per_token(latent_spec(61, 128), 2) == 70_272


def test_the_transfer_sees_one_part() -> None:
    spec = latent_spec(2, 16)
    cache = PagedCache(spec, 16, cache_bytes(spec, 4, 16, torch.bfloat16), torch.bfloat16, torch.device("cpu"))
    layout = layout_of(cache)
    assert (layout.kv_heads, layout.dims) == (1, (576,))
    assert layout.page_bytes == cache.page_bytes == cache.tensor[0].nbytes == 16 * 2 * 576 * 2
    assert layout.page_address(1) == cache.tensor[1].data_ptr()


def test_checksums_of_partly_filled_pages() -> None:
    spec = latent_spec(2, 16)
    cache = PagedCache(spec, 16, cache_bytes(spec, 4, 16, torch.bfloat16), torch.bfloat16, torch.device("cpu"))
    cache.tensor.normal_()
    sums = page_checksums(cache.tensor)
    before, words = list(sums([0, 2], [16, 5])), as_words(cache.tensor)
    assert before == reference_sums(words.words, words.tokens(), [0, 2], [16, 5])
    cache.tensor[2, :, :, :, 5:] += 1
    assert list(sums([0, 2], [16, 5])) == before
    cache.tensor[2, 1, 0, 0, 4, 575] += 1
    assert list(sums([2], [5])) != before[1:]
