"""What steps of prompts are padded to on GPUs: as the engine captures them, and as worker and router count on it."""

from dataclasses import dataclass

TILE_TOKENS = 128
"""Of a large product's tile: it takes the matrix units as long for one token as for all of these."""
_FEWEST_SLOTS = 16
_FINE, _MOST = 8, 16
"""Tiles up to which steps are captured for each number of them, and for every second one; beyond, none is."""


@dataclass(frozen=True, slots=True)
class StepGrid:
    """The pieces in which a device computes steps of prompts."""

    tile_tokens: int = 1
    """A step has a multiple of so many tokens."""
    wave_tokens: int = 1
    """Attention of so many of them takes as long as that of one."""


EACH_TOKEN = StepGrid()
"""Of devices that compute each token by itself."""
H200_MULTIPROCESSORS = 132


def gpu_grid(attention_heads: int, multiprocessors: int = H200_MULTIPROCESSORS) -> StepGrid:
    """Attention of prompts gives each multiprocessor a tile of tokens of one head, with all that it attends to: a chunk
    of fewer tokens than fill all of them leaves the others idle for as long.
    """
    wave = max(1, multiprocessors // attention_heads) * TILE_TOKENS
    return StepGrid(TILE_TOKENS, wave)


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
