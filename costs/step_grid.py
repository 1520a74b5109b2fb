"""What steps of prompts are padded to on GPUs: as the engine captures them, and as worker and router count on it."""

from dataclasses import dataclass

TILE_TOKENS = 128
"""Of a large product's tile: it takes the matrix units as long for one token as for all of these."""
_FEWEST_SLOTS = 16
_FINE, _MOST = 8, 16
"""Tiles up to which steps are captured for each number of them, and for every second one; beyond, none is."""
WINDOW_TOKENS = 2048
"""Of context that attention of a short chunk gives to one multiprocessor, where it is split: a tile of 32 heads behind
8,192 tokens is work for 128 of an H200's 132. Smaller windows would fill them behind less context, but each costs a
copy of the queries and a partial result that has to be merged.
"""
_MOST_WINDOWS = 64
"""Of a context: beyond, copies and partial results would take more memory than steps of 2,048 tokens do."""
_SPLIT_TILES = 2
"""Most tiles of such chunks. Where heads are few more of them would leave multiprocessors idle as well, but half of
these at most, and each size takes a graph.
"""
_WINDOWS_RATIO = 4
"""Of the most windows of one graph to those of the next smaller one: work is launched for as many, needed or not."""


@dataclass(frozen=True, slots=True)
class StepGrid:
    """The pieces in which a device computes steps of prompts."""

    tile_tokens: int = 1
    """A step has a multiple of so many tokens."""
    wave_tokens: int = 1
    """Attention of so many of them takes as long as that of one."""
    window_tokens: int = 0
    """Unless their context is cut into windows of so many tokens (`splits_attention`); 0 = it never is."""


EACH_TOKEN = StepGrid()
"""Of devices that compute each token by itself."""
H200_MULTIPROCESSORS = 132


def gpu_grid(attention_heads: int, multiprocessors: int = H200_MULTIPROCESSORS, *, split: bool = False) -> StepGrid:
    """Attention of prompts gives each multiprocessor a tile of tokens of one head, with all that it attends to: a chunk
    of fewer tokens than fill all of them leaves the others idle for as long. Or, with `split`, if it leaves half of
    them, it attends to windows of its context side by side.
    """
    wave = max(1, multiprocessors // attention_heads) * TILE_TOKENS
    return StepGrid(TILE_TOKENS, wave, WINDOW_TOKENS if split else 0)


def most_split(wave: int) -> int:
    """Most prompt tokens of a step whose attention may be split: those that leave half of a wave, or more, idle."""
    return min(_SPLIT_TILES, wave // (2 * TILE_TOKENS)) * TILE_TOKENS


def splits_attention(tokens: int, context: float, wave: int, window: int) -> bool:
    """Whether a step of so many prompt tokens, of which one attends to so much context, attends to windows of it side
    by side.
    """
    return bool(window) and 2 * window <= context <= _MOST_WINDOWS * window and 0 < tokens <= most_split(wave)


def window_counts(most_context: int, window: int) -> list[int]:
    """Most windows of a context that steps are captured for, rising; none if no context is long enough."""
    if not window or most_context < 2 * window:
        return []
    most = min(_MOST_WINDOWS, -(-most_context // window))
    counts = [_WINDOWS_RATIO]
    while counts[-1] < most:
        counts.append(counts[-1] * _WINDOWS_RATIO)
    return [*counts[:-1], most]


def slots_of(answers: int) -> int:
    """Places that so many answers take in a step with prompts."""
    return max(_FEWEST_SLOTS, 1 << (answers - 1).bit_length()) if answers else 0


def answer_slots(most: int) -> list[int]:
    """All numbers of places that up to `most` answers take, rising; the last is for `most`."""
    slots = [_FEWEST_SLOTS]
    while slots[-1] < most:
        slots.append(2 * slots[-1])
    return [*slots[:-1], min(slots[-1], most)]


def step_sizes(most: int) -> list[int]:
    """Tokens of the steps with prompts that are captured, their answers' places included, up to `most`; rising."""
    sizes = [tiles * TILE_TOKENS for tiles in (*range(1, _FINE), *range(_FINE, _MOST + 1, 2))]
    return [size for size in sizes if size <= most]


def _between(tiles: int) -> bool:
    """Whether steps of one tile fewer and one more are captured, and none of so many."""
    return _FINE < tiles < _MOST and tiles % 2 == 1


def padded_prompts(tokens: int, answers: int, tile: int) -> int:
    """Prompt tokens that a step computes that has so many, beside so many answers, where steps fill tiles."""
    if tile <= 1:
        return tokens
    slots = slots_of(answers)
    tiles = -(-(tokens + slots) // tile)
    return (tiles + _between(tiles)) * tile - slots


def unpadded_prompts(tokens: int, answers: int, tile: int) -> int:
    """The most of `tokens` that fill a step's tiles beside so many answers; all of them if they fill none."""
    if tile <= 1:
        return tokens
    slots = slots_of(answers)
    tiles = (tokens + slots) // tile
    whole = (tiles - _between(tiles)) * tile - slots
    return whole if whole > 0 else tokens
