"""The sizes of steps with prompts that the engine captures on GPUs.

`tandem/cost_model/step_cost.py` charges for the padding to these sizes.
"""

from dataclasses import dataclass

TILE_TOKENS = 128
"""Number of tokens in a tile of a large matrix product: the product takes as long for one token as for a tile."""
FEWEST_SLOTS = 16
"""Minimum number of batch slots of a step that has both prompts and decode rows."""
FINE_TILES, MOST_TILES = 8, 16
"""Numbers of tiles of captured steps: each up to the first value, then every second one up to the other value."""


@dataclass(frozen=True, slots=True)
class StepGrid:
    """The units in which a device computes steps of prompts."""

    tile_tokens: int = 1
    """The number of tokens of a step is padded to a multiple of this."""
    wave_tokens: int = 1
    """The attention of this many tokens takes as long as that of one token."""


EACH_TOKEN = StepGrid()
"""The grid of devices that compute each token by itself, without padding."""
H200_MULTIPROCESSORS = 132


def gpu_grid(attention_heads: int, multiprocessors: int = H200_MULTIPROCESSORS) -> StepGrid:
    """Return the grid of a GPU.

    Prefill attention gives each multiprocessor a tile of tokens of one head: a chunk with fewer tiles than
    multiprocessors leaves the others idle.
    """
    wave = max(1, multiprocessors // attention_heads) * TILE_TOKENS
    return StepGrid(TILE_TOKENS, wave)


def answer_slots(most: int) -> list[int]:
    """Return all numbers of batch slots that 1 to `most` decode rows take, ascending; none exceeds `most`."""
    slots = [FEWEST_SLOTS]
    while slots[-1] < most:
        slots.append(2 * slots[-1])
    return [*slots[:-1], min(slots[-1], most)]


def step_sizes(most: int) -> list[int]:
    """Return the numbers of tokens of captured steps with prompts, batch slots included, up to `most`, ascending."""
    sizes = [tiles * TILE_TOKENS for tiles in (*range(1, FINE_TILES), *range(FINE_TILES, MOST_TILES + 1, 2))]
    return [size for size in sizes if size <= most]
