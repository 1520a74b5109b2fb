"""How decode attention cuts rows into programs' stretches, in plain Python: every tile written out.

All rows' tiles lie in one line, and each program takes as many cells of it as every other. A row's place in the line is
its tiles, of a padded row one cell with no tile in it. Where rows are of about one length, each has a place of the same
length, whose last cells may hold no tile, so that no program's end cuts a row that need not be cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from engine.kernels.attention.triton_attention_kernels import Walk

WASTE = Fraction(9, 8)
"""Cells that places of one length may take, to the tiles that there are."""

Cell = tuple[int, int | None]
"""A row and the number of one of its tiles, or None."""


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """What a program takes of a row, the tiles counted from position 0. A row of several parts is merged, in their
    order, by whichever program ends last.
    """

    program: int
    row: int
    tiles: tuple[int, ...]
    number: int = 0
    of: int = 1


@dataclass(frozen=True, slots=True)
class Line:
    """All rows' cells, `stretch` for each program, and how long a place is at least."""

    rows: int
    cells: tuple[Cell, ...]
    stretch: int
    least: int

    def parts(self) -> list[Part]:
        """Of all programs and rows."""
        taken: dict[int, dict[int, list[int]]] = {row: {} for row in range(self.rows)}
        for at, (row, tile) in enumerate(self.cells):
            taken[row].setdefault(at // self.stretch, []).extend(() if tile is None else (tile,))
        return sorted(
            Part(program, row, tuple(tiles), number, len(programs))
            for row, programs in taken.items()
            for number, (program, tiles) in enumerate(programs.items())
        )

    def walk(self, program: int) -> Walk:
        """The record of this program; of one behind the line's end, no row from there on."""
        met = {row for row, _ in self.cells[program * self.stretch : (program + 1) * self.stretch]}
        first, last = (min(met), max(met) + 1) if met else (self.rows, self.rows)
        return Walk(first, last, sum(row < first for row, _ in self.cells), self.stretch, self.least)


def seen_tiles(context: int, window: int | None, block_tokens: int) -> list[int]:
    """Numbers of the tiles that hold a position that a row sees."""
    first = 0 if window is None else max(0, context - window)
    return sorted({position // block_tokens for position in range(first, context)})


def walked(rows: Sequence[Sequence[int]], programs: int) -> Line:
    """The line of rows that see these tiles, and how it is cut."""
    even = _even(rows, programs)
    stretch, least = even or (-(-sum(len(tiles) or 1 for tiles in rows) // programs), 1)
    cells: list[Cell] = []
    for row, tiles in enumerate(rows):
        empty = max(len(tiles), least) - len(tiles) if tiles else 1
        cells += [(row, tile) for tile in tiles] + [(row, None)] * empty
    return Line(len(rows), tuple(cells), stretch, least)


def split(rows: Sequence[Sequence[int]], splits: int, least: int) -> list[Part]:
    """Where each row has `splits` programs of its own: as few parts as have `least` tiles, or a row's share."""
    found = []
    for row, tiles in enumerate(rows):
        share = max(-(-len(tiles) // splits), least)
        parts = [tuple(tiles[start : start + share]) for start in range(0, len(tiles), share)] or [()]
        found += [Part(row * splits + number, row, part, number, len(parts)) for number, part in enumerate(parts)]
    return sorted(found)


def _even(rows: Sequence[Sequence[int]], programs: int) -> tuple[int, int] | None:
    """Cells of a program and of a place, where all places are of one length; None where that wastes too much."""
    lengths = [len(tiles) for tiles in rows if tiles]
    if not lengths:
        return None
    if len(lengths) <= programs:
        parts = programs // len(lengths)
        stretch = -(-max(lengths) // parts)
        place = parts * stretch
    else:
        place = max(lengths)
        stretch = -(-len(lengths) // programs) * place
    room, line = programs * stretch, place * len(lengths) + (len(rows) - len(lengths))
    return (stretch, place) if line <= room <= WASTE * sum(lengths) else None
