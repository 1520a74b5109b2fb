"""The sizes of prompt steps that the engine captures on GPUs; `tandem/cost_model/step_cost.py` charges for them."""

from dataclasses import dataclass

TILE_TOKENS = 128
"""The tokens of a large product's tile: it takes the matrix units as long for one token as for all of these."""
FEWEST_SLOTS = 16
"""The fewest batch slots of a step with prompts that also decodes."""
FINE_TILES, MOST_TILES = 8, 16
"""Steps are captured for each number of tiles up to the first, for every second one up to the other, then for none."""


@dataclass(frozen=True, slots=True)
class StepGrid:
    """The units in which a device computes steps of prompts."""

    tile_tokens: int = 1
    """A step has a multiple of this many tokens."""
    wave_tokens: int = 1
    """Attention of this many tokens takes as long as that of one."""


EACH_TOKEN = StepGrid()
"""The grid of devices that compute each token by itself."""
H200_MULTIPROCESSORS = 132


def gpu_grid(attention_heads: int, multiprocessors: int = H200_MULTIPROCESSORS) -> StepGrid:
    """Return the grid of a GPU.

    Prefill attention gives each multiprocessor a tile of tokens of one head: a chunk with fewer tiles than
    multiprocessors leaves the others idle.
    """
    wave = max(1, multiprocessors // attention_heads) * TILE_TOKENS
    return StepGrid(TILE_TOKENS, wave)


def answer_slots(most: int) -> list[int]:
    """Return all numbers of batch slots that up to `most` decode rows take, rising; the last is `most`'s."""
    slots = [FEWEST_SLOTS]
    while slots[-1] < most:
        slots.append(2 * slots[-1])
    return [*slots[:-1], min(slots[-1], most)]


def step_sizes(most: int) -> list[int]:
    """Return the tokens of captured steps with prompts, batch slots included, up to `most`, rising."""
    sizes = [tiles * TILE_TOKENS for tiles in (*range(1, FINE_TILES), *range(FINE_TILES, MOST_TILES + 1, 2))]
    return [size for size in sizes if size <= most]
