"""The tile ranges of decode attention's programs in plain Python: every tile written out.

All rows' tiles are concatenated to one line, and each program takes an equal number of its cells. A row's span in the
line is its tiles; of a padded row it is one cell without a tile. Where rows are of similar length, each has a span of
the same length, whose last cells may hold no tile, so that no program's end cuts a row unnecessarily.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tandem.engine.kernels.attention.triton_attention_ranges import TileRange

WASTE = Fraction(9, 8)
"""The largest ratio of the cells of equal spans to the existing tiles."""

Cell = tuple[int, int | None]
"""A row and the number of one of its tiles, or None."""


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A program's part of a row, the tiles counted from position 0.

    A row of several parts is merged, in their order, by the program that ends last.
    """

    program: int
    row: int
    tiles: tuple[int, ...]
    number: int = 0
    of: int = 1


@dataclass(frozen=True, slots=True)
class Line:
    """All rows' cells, `range_tiles` for each program, and `least`, the minimum length of a span."""

    rows: int
    cells: tuple[Cell, ...]
    range_tiles: int
    least: int

    def parts(self) -> list[Part]:
        """Returns the parts of all programs and rows."""
        taken: dict[int, dict[int, list[int]]] = {row: {} for row in range(self.rows)}
        for at, (row, tile) in enumerate(self.cells):
            taken[row].setdefault(at // self.range_tiles, []).extend(() if tile is None else (tile,))
        return sorted(
            Part(program, row, tuple(tiles), number, len(programs))
            for row, programs in taken.items()
            for number, (program, tiles) in enumerate(programs.items())
        )

    def tile_range(self, program: int) -> TileRange:
        """Returns the record of this program; of one after the line's end, no row from there on."""
        met = {row for row, _ in self.cells[program * self.range_tiles : (program + 1) * self.range_tiles]}
        first, last = (min(met), max(met) + 1) if met else (self.rows, self.rows)
        return TileRange(first, last, sum(row < first for row, _ in self.cells), self.range_tiles, self.least)


def seen_tiles(context: int, window: int | None, block_tokens: int) -> list[int]:
    """Returns the numbers of the tiles that hold a position that a row sees."""
    first = 0 if window is None else max(0, context - window)
    return sorted({position // block_tokens for position in range(first, context)})


def tile_line(rows: Sequence[Sequence[int]], programs: int) -> Line:
    """Returns the line of rows that see these tiles, and its partition."""
    even = _even(rows, programs)
    range_tiles, least = even or (-(-sum(len(tiles) or 1 for tiles in rows) // programs), 1)
    cells: list[Cell] = []
    for row, tiles in enumerate(rows):
        empty = max(len(tiles), least) - len(tiles) if tiles else 1
        cells += [(row, tile) for tile in tiles] + [(row, None)] * empty
    return Line(len(rows), tuple(cells), range_tiles, least)


def split(rows: Sequence[Sequence[int]], splits: int, least: int) -> list[Part]:
    """Returns the parts if each row has `splits` programs: as few as have `least` tiles, or a row's share."""
    all_parts = []
    for row, tiles in enumerate(rows):
        share = max(-(-len(tiles) // splits), least)
        parts = [tuple(tiles[start : start + share]) for start in range(0, len(tiles), share)] or [()]
        all_parts += [Part(row * splits + number, row, part, number, len(parts)) for number, part in enumerate(parts)]
    return sorted(all_parts)


def _even(rows: Sequence[Sequence[int]], programs: int) -> tuple[int, int] | None:
    """Returns the cells of a program and of a span, if all spans have equal length; None if that wastes too much."""
    lengths = [len(tiles) for tiles in rows if tiles]
    if not lengths:
        return None
    if len(lengths) <= programs:
        parts = programs // len(lengths)
        range_tiles = -(-max(lengths) // parts)
        span = parts * range_tiles
    else:
        span = max(lengths)
        range_tiles = -(-len(lengths) // programs) * span
    room, line = programs * range_tiles, span * len(lengths) + (len(rows) - len(lengths))
    return (range_tiles, span) if line <= room <= WASTE * sum(lengths) else None
