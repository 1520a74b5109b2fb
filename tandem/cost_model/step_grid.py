"""The sizes, in tokens, at which the engine captures CUDA graphs of steps with prompts.

Steps are padded to these sizes; `tandem/cost_model/step_cost.py` includes the padding in the cost of a step.
"""

from dataclasses import dataclass

TILE_TOKENS = 128
"""Number of tokens in a tile of a large matrix product: the product takes as long for one token as for a tile."""
FEWEST_SLOTS = 16
"""Minimum number of batch slots of a step that has both prompts and decode rows."""
FINE_TILES, MOST_TILES = 8, 16
"""The numbers of tiles of captured steps: 1, 2, 3, … up to `FINE_TILES`, then only even numbers up to `MOST_TILES`."""


@dataclass(frozen=True, slots=True)
class StepGrid:
    """The sizes to which a device pads the steps of prompts."""

    tile_tokens: int = 1
    """The number of tokens of a step is padded to a multiple of this."""
    wave_tokens: int = 1
    """Number of prompt tokens whose attention takes as long as that of a single token."""


EACH_TOKEN = StepGrid()
"""The grid of devices that compute each token separately, without padding."""
H200_MULTIPROCESSORS = 132


def gpu_grid(attention_heads: int, multiprocessors: int = H200_MULTIPROCESSORS) -> StepGrid:
    """Return the grid of a GPU for a model with `attention_heads` heads.

    Prefill attention gives each multiprocessor a tile of tokens of one head. A chunk with fewer tiles than
    multiprocessors leaves the others idle, so up to that size (a wave) another token costs no time.
    """
    wave = max(1, multiprocessors // attention_heads) * TILE_TOKENS
    return StepGrid(TILE_TOKENS, wave)


def answer_slots(most: int) -> list[int]:
    """Return the possible numbers of batch slots for 1 to `most` decode rows, ascending and at most `most`."""
    slots = [FEWEST_SLOTS]
    while slots[-1] < most:
        slots.append(2 * slots[-1])
    return [*slots[:-1], min(slots[-1], most)]


def step_sizes(most: int) -> list[int]:
    """Return the sizes of captured steps with prompts in tokens, batch slots included: ascending, at most `most`."""
    sizes = [tiles * TILE_TOKENS for tiles in (*range(1, FINE_TILES), *range(FINE_TILES, MOST_TILES + 1, 2))]
    return [size for size in sizes if size <= most]
