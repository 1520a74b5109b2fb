"""Plans which bytes each prefill rank writes to which decode rank if the two workers divide a model differently.

The workers may differ in tensor parallelism, pipeline parallelism and page size; `why_not` returns why a pair is not
supported.

A page of the whole model consists of planes, one for each KV head, layer and part (keys, values, or latents). A plane
has the elements of the page's tokens, followed by their scales in an 8-bit cache. Each rank has its own pool. A page of
this pool has the planes of the rank's heads and layers, ordered by head, then by layer, then by part. A page id refers
to the same tokens on every rank of a worker.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product


@dataclass(frozen=True, slots=True)
class RankedPages:
    """The division of one group of layers' pages among the ranks of a worker.

    Ranks are numbered stage by stage: rank = stage · tensor_ranks + number within the stage.
    """

    tensor_ranks: int
    """Number of ranks that divide the heads of a layer. If it exceeds `kv_heads`, several ranks hold the same head."""
    kv_heads: int
    """Number of KV heads of the whole model; 1 for latents, which every rank of a stage holds."""
    stages: tuple[tuple[int, ...], ...]
    """For each pipeline stage, the numbers of its layers in a page, in order."""
    page_tokens: int
    token_bytes: tuple[int, ...]
    """For each part, keys and values or latents, the size in bytes of one token's elements in a plane."""
    scale_bytes: int = 0
    """Size in bytes of one token's scale in a plane."""
    alignment: int = 1
    """The size of a pool's pages is a multiple of this number of bytes, if any group of the model has this alignment.

    A page of states is divided like one of a single token whose elements are the state of a head and layer.
    """

    @property
    def ranks(self) -> int:
        """Number of ranks of the worker."""
        return self.tensor_ranks * len(self.stages)

    @property
    def plane_bytes(self) -> tuple[int, ...]:
        """For each part, the size of a plane in bytes."""
        return tuple(self.page_tokens * (size + self.scale_bytes) for size in self.token_bytes)

    def heads(self, rank: int) -> range:
        """Return the heads that a rank holds."""
        number = rank % self.tensor_ranks
        if self.kv_heads >= self.tensor_ranks:
            count = self.kv_heads // self.tensor_ranks
            return range(number * count, (number + 1) * count)
        head = number * self.kv_heads // self.tensor_ranks
        return range(head, head + 1)

    def layers(self, rank: int) -> tuple[int, ...]:
        """Return the layers that a rank holds."""
        return self.stages[rank // self.tensor_ranks]

    def page_bytes(self, rank: int) -> int:
        """Return the size of a page of a rank in bytes."""
        return len(self.heads(rank)) * len(self.layers(rank)) * sum(self.plane_bytes)

    def holders(self, head: int, layer: int) -> list[int]:
        """Return the ranks that hold a head of a layer."""
        return [rank for rank in range(self.ranks) if layer in self.layers(rank) and head in self.heads(rank)]

    def regions(self, rank: int, head: int, layer: int, part: int, token: int) -> tuple[int, int]:
        """Return the offsets of a token's elements and of its scale in a page of a rank, in bytes."""
        layers, planes, size = self.layers(rank), self.plane_bytes, self.token_bytes[part]
        number = (head - self.heads(rank).start) * len(layers) + layers.index(layer)
        start = number * sum(planes) + sum(planes[:part])
        return start + token * size, start + self.page_tokens * size + token * self.scale_bytes


def pool_page_bytes(groups: Iterable[RankedPages], rank: int) -> int:
    """Return the size in bytes of a page of a rank's pool, in which all groups of layers have their pages."""
    groups = tuple(groups)
    alignment = max(group.alignment for group in groups)
    return -(-max(group.page_bytes(rank) for group in groups) // alignment) * alignment


def even_stages(layers: int, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of each stage's layers; stage 0, that of the first rank, has the last layers.

    The first rank computes the logits and samples. If `layers` cannot be divided, some stages
    have one layer more than others.
    """
    starts = [-(-stage * layers // stages) for stage in range(stages + 1)]
    return tuple(tuple(range(starts[stage], starts[stage + 1])) for stage in reversed(range(stages)))


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A range of bytes to copy from a page of a source rank to a page of a target rank."""

    source_rank: int
    target_rank: int
    source_page: int
    """The number of the source page among those that share a target page; 0 if no other source page shares it."""
    target_page: int
    """The number of the target page among those that share a source page; 0 if no other target page shares it."""
    source_start: int
    """The offset in the source page, in bytes."""
    target_start: int
    bytes: int

    @property
    def reversed(self) -> "ByteRange":
        """The same range with source and target exchanged."""
        return ByteRange(
            self.target_rank,
            self.source_rank,
            self.target_page,
            self.source_page,
            self.target_start,
            self.source_start,
            self.bytes,
        )

    @property
    def source_end(self) -> int:
        """The offset of the end in the source page, in bytes."""
        return self.source_start + self.bytes

    @property
    def target_end(self) -> int:
        """The offset of the end in the target page, in bytes."""
        return self.target_start + self.bytes


def why_not(source: RankedPages, target: RankedPages) -> str | None:
    """Return the reason why KV cannot be handed over from `source` to `target`, as a clause; None if it can."""
    for what, source_value, target_value in (
        ("KV heads", source.kv_heads, target.kv_heads),
        ("parts per layer", len(source.token_bytes), len(target.token_bytes)),
        ("bytes per token and head", _listed(source.token_bytes), _listed(target.token_bytes)),
        ("bytes per scale", source.scale_bytes, target.scale_bytes),
        ("layers", sorted(chain(*source.stages)), sorted(chain(*target.stages))),
    ):
        if source_value != target_value:
            return f"the prefill worker has {source_value} {what} and the decode worker {target_value}"
    sizes = source.page_tokens, target.page_tokens
    if max(sizes) % min(sizes):
        return f"pages of {sizes[0]} and of {sizes[1]} tokens do not divide each other"
    return None


def _listed(sizes: tuple[int, ...]) -> str:
    return " and ".join(map(str, dict.fromkeys(sizes)))


@lru_cache(maxsize=64)
def plan_handoff(source: RankedPages, target: RankedPages) -> tuple[ByteRange, ...]:
    """Return the byte ranges to write for each target page, or for each source page if source pages are larger.

    Each byte of every target rank's page is in exactly one range. If n source ranks hold the same head, number
    (target's tensor rank modulo n) of these source ranks writes it, so that the load is even. Ranges that are adjacent
    on both sides are merged: with equal stages and page sizes, there is one range for each pair of ranks. Raises
    ValueError if `why_not` gives a reason.
    """
    if (reason := why_not(source, target)) is not None:
        raise ValueError(reason)
    return tuple(chain.from_iterable(_merged(_ranges_to(rank, source, target)) for rank in range(target.ranks)))


def _ranges_to(rank: int, source: RankedPages, target: RankedPages) -> Iterator[ByteRange]:
    """Yield the ranges of one target rank, in the order of its bytes within each block of tokens."""
    tokens = min(source.page_tokens, target.page_tokens)
    for block in range(max(source.page_tokens, target.page_tokens) // tokens):
        # Several smaller pages share a larger one.
        from_page, from_token = (0, block * tokens) if source.page_tokens > tokens else (block, 0)
        to_page, to_token = (0, block * tokens) if target.page_tokens > tokens else (block, 0)
        for head, layer, part in product(target.heads(rank), target.layers(rank), range(len(target.token_bytes))):
            holders = source.holders(head, layer)
            writer = holders[rank % target.tensor_ranks % len(holders)]
            for source_start, target_start, size in zip(
                source.regions(writer, head, layer, part, from_token),
                target.regions(rank, head, layer, part, to_token),
                (target.token_bytes[part], target.scale_bytes),
                strict=True,
            ):
                if size:
                    yield ByteRange(writer, rank, from_page, to_page, source_start, target_start, tokens * size)


def _merged(ranges: Iterator[ByteRange]) -> Iterator[ByteRange]:
    """Join each range with the next one if they are adjacent on both sides."""
    last = next(ranges)
    for byte_range in ranges:
        if (
            replace(last, source_start=last.source_end, target_start=last.target_end, bytes=byte_range.bytes)
            == byte_range
        ):
            last = replace(last, bytes=last.bytes + byte_range.bytes)
        else:
            yield last
            last = byte_range
    yield last
