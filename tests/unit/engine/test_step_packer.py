"""Steps in one buffer: rows with padding after them, tokens that only the device knows, and refusals."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.speculation.draft_rows import with_drafts
from tandem.engine.steps.batch import FROM_HOST, RowColumns, StepBatch, StepRow, TokenRows
from tandem.engine.steps.sampling_metadata import SamplingInput, SamplingMetadata
from tandem.engine.steps.step_buffer import StepLimits, StepSizes
from tandem.engine.steps.step_packer import PackedStep, StepPacker, unpack, view_step
from tandem.protocol.errors import Internal
from tandem.protocol.kv_pages import STATE
from tandem.protocol.messages import SamplingParams
from tests.soak import seeds

LIMITS = StepLimits(vocab_size=50, max_context=64, pages=9, page_tokens=4)
DRAW = SamplingInput(SamplingParams(max_tokens=1), 0)


def row(
    token_ids: list[int], start: int, pages: list[int], source: int | None = None, draw: SamplingInput | None = DRAW
) -> StepRow:
    return StepRow(token_ids, start, pages, draw, source)


def test_padded_rows_read_and_write_nothing() -> None:
    packer = StepPacker(LIMITS)
    batch = StepBatch([row([7], 5, [3, 8]), row([9], 0, [1])])
    sizes = StepSizes(tokens=4, rows=4, width=16, drawn=4)
    words = torch.full((sizes.words,), -77, dtype=torch.int64)
    packer.pack(batch, sizes, words.numpy())
    step = view_step(words, sizes, max_row_tokens=1, max_context=64, single_rows=4)
    assert step.token_ids.tolist()[:2] == [7, 9]
    assert step.layout.slots.tolist() == [8 * 4 + 1, 4, -1, -1]
    assert step.layout.context_lens.tolist() == [6, 1, 0, 0]
    assert step.layout.positions.tolist() == [5, 0, 0, 0]
    assert step.layout.page_table[:, :2].tolist() == [[3, 8], [1, 0], [0, 0], [0, 0]]
    assert step.sources.tolist() == [-1, -1, -1, -1]
    assert step.layout.row_starts.tolist() == [0, 1, 2, 3, 4]
    assert step.drawn is None


def test_prompts_in_a_larger_step_leave_empty_rows_after_their_tokens() -> None:
    packer = StepPacker(LIMITS)
    batch = StepBatch([row([7, 8, 9], 5, [3, 8]), row([4, 5], 0, [1], draw=None)])
    sizes = StepSizes(tokens=8, rows=4, width=16, drawn=4)
    words = torch.full((sizes.words,), -77, dtype=torch.int64)
    packer.pack(batch, sizes, words.numpy())
    step = view_step(words, sizes, max_row_tokens=8, max_context=64, single_rows=0)
    assert step.token_ids.tolist() == [7, 8, 9, 4, 5, 0, 0, 0]
    assert step.layout.slots.tolist() == [33, 34, 35, 4, 5, -1, -1, -1]
    assert step.layout.positions.tolist() == [5, 6, 7, 0, 1, 0, 0, 0]
    assert step.layout.row_starts.tolist() == [0, 3, 5, 5, 5]
    assert step.layout.context_lens.tolist() == [8, 2, 0, 0]
    assert step.layout.page_table[:, :2].tolist() == [[3, 8], [1, 0], [0, 0], [0, 0]]
    assert step.sources.tolist() == [-1] * 8
    assert step.drawn is not None
    assert step.drawn.tolist() == [2, 0, 0, 0]


def test_answers_and_prompts_in_a_larger_step() -> None:
    """Two padding rows are between them, and one empty row and tokens after the last."""
    packer = StepPacker(LIMITS)
    batch = StepBatch([row([0], 5, [3, 8], source=1), row([4, 5], 0, [1], draw=None), row([7, 8, 9], 5, [6, 2])])
    sizes = StepSizes(tokens=3 + 8, rows=3 + 3, width=16, drawn=6)
    words = torch.full((sizes.words,), -77, dtype=torch.int64)
    packer.pack(batch, sizes, words.numpy(), drawn_before=[0, 4], chunks_at=3)
    step = view_step(words, sizes, max_row_tokens=8, max_context=64, single_rows=3)
    assert step.token_ids.tolist() == [0, 0, 0, 4, 5, 7, 8, 9, 0, 0, 0]
    assert step.sources.tolist() == [4] + [-1] * 10
    assert step.layout.slots.tolist() == [33, -1, -1, 4, 5, 9, 10, 11, -1, -1, -1]
    assert step.layout.positions.tolist() == [5, 0, 0, 0, 1, 5, 6, 7, 0, 0, 0]
    assert step.layout.row_starts.tolist() == [0, 1, 2, 3, 5, 8, 8]
    assert step.layout.context_lens.tolist() == [6, 0, 0, 2, 8, 0]
    assert step.layout.page_table[:, :2].tolist() == [[3, 8], [0, 0], [0, 0], [1, 0], [6, 2], [0, 0]]
    assert step.drawn is not None
    assert step.drawn.tolist() == [0, 7, 0, 0, 0, 0], "logits in the order of the draws"


def test_sources_are_draws_of_the_step_before() -> None:
    packer = StepPacker(LIMITS)
    batch = StepBatch([row([0], 5, [3, 8], source=2), row([4, 5, 6], 0, [1]), row([0], 1, [2], source=0)])
    sizes = packer.sizes(batch)
    words = torch.empty(sizes.words, dtype=torch.int64)
    # Of the step before, row 1 drew nothing.
    packer.pack(batch, sizes, words.numpy(), drawn_before=[0, -1, 1])
    step = unpack(words, sizes, batch, words.device)
    assert step.sources.tolist() == [1, -1, -1, -1, 0]
    assert step.layout.single_rows == 1
    assert step.drawn is not None
    assert step.drawn.tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (row([50], 0, [1]), "token id"),
        (row([1], 0, [9]), "page id"),
        (row([1], 4, [1]), "pages"),
        (row([1], 64, list(range(9)) * 2), "context"),
        (row([], 0, [1]), "at least one token"),
        (row([1, 2], 0, [1], source=0), "exactly that token"),
    ],
)
def test_what_breaks_the_limits_is_refused(bad: StepRow, says: str) -> None:
    packer = StepPacker(LIMITS)
    batch = StepBatch([bad])
    with pytest.raises(Internal, match=says):
        packer.pack(batch, sizes := packer.sizes(batch), torch.empty(sizes.words, dtype=torch.int64).numpy())


def scattered(rows: list[StepRow], dice: random.Random) -> TokenRows:
    """Places their pages in arbitrary rows of a larger table, which has other numbers after them."""
    places = dice.sample(range(2 * len(rows)), len(rows))
    table = np.full((2 * len(rows), 16), 99, dtype=np.int32)
    held = np.full(len(table), 16, dtype=np.int32)
    adapters = np.full(len(table), 77, dtype=np.int32)
    number = dice.randrange(20)
    for place, row in zip(places, rows, strict=True):
        table[place, : len(row.page_ids)] = row.page_ids
        held[place] = len(row.page_ids)
        adapters[place] = row.adapter
    columns = RowColumns(
        np.array([row.token_ids[0] for row in rows]),
        np.array([row.start - number for row in rows]),
        number,
        np.array([FROM_HOST if row.source is None else row.source for row in rows], dtype=np.int32),
        np.array(places),
        table,
        held,
        adapters,
        max(row.start for row in rows) + 1,
        SamplingMetadata.of([DRAW] * len(rows)),
    )
    return TokenRows(len(rows), 0, lambda: columns)


@seeds(8)
def test_rows_are_packed_as_one_by_one(seed: int) -> None:
    """Decode rows, padding rows up to `chunks_at`, and prompts, in a buffer with old contents."""
    dice = random.Random(seed)
    packer, words = StepPacker(LIMITS), torch.full((4096,), -77, dtype=torch.int64)
    for _ in range(30):
        drawn_before = dice.choice(([], dice.sample(range(40), 8)))
        answers = [
            row([dice.randrange(50)], start, dice.choices(range(9), k=start // 4 + dice.randrange(1, 3)), source)
            for start in dice.choices(range(36), k=dice.randrange(1, 9))
            for source in [dice.choice((None, dice.randrange(8)))]
        ]
        lengths = dice.choices(range(2, 9), k=dice.choice((0, 0, 2)))
        prompts = [row([7] * count, 3, [5, 6, 8], draw=dice.choice((None, DRAW))) for count in lengths]
        answers, prompts = ([row._replace(adapter=dice.randrange(4)) for row in some] for some in (answers, prompts))
        batch = StepBatch(prompts, scattered(answers, dice))
        least = packer.sizes(batch)
        pad, empty = dice.randrange(4), dice.randrange(3) if prompts else 0
        sizes = StepSizes(
            least.tokens + pad + empty, least.rows + pad + empty, least.width + 2, least.drawn + pad + empty
        )
        here = words[: sizes.words]
        packer.pack(batch, sizes, here.numpy(), drawn_before, len(answers) + pad)
        step = view_step(here, sizes, max_row_tokens=8, max_context=64, single_rows=0)
        assert_packed(step, [*answers, *[None] * pad, *prompts, *[None] * empty], len(answers) + pad, drawn_before)


def assert_packed(step: PackedStep, rows: list[StepRow | None], singles: int, drawn_before: list[int]) -> None:
    """Checks `rows` one by one; padding rows have a token below `singles`."""
    at, drawn, layout = 0, [], step.layout
    for number, row in enumerate(rows):
        assert layout.row_starts[number] == at
        tokens = ([0] if number < singles else []) if row is None else row.token_ids
        pages = [] if row is None else list(row.page_ids)
        end = 0 if row is None else row.start + len(tokens)
        used = pages if number < singles else pages[: -(-end // 4)]
        assert layout.context_lens[number] == end
        assert layout.page_table[number].tolist() == (used + [0] * 16)[: layout.page_table.shape[1]]
        for offset, token in enumerate(tokens):
            position = 0 if row is None else row.start + offset
            source = -1 if row is None or row.source is None else row.source
            assert step.token_ids[at] == token
            assert layout.positions[at] == position
            assert layout.adapters is not None
            assert layout.adapters[at] == (0 if row is None else row.adapter)
            assert layout.slots[at] == (-1 if row is None else pages[position // 4] * 4 + position % 4)
            assert step.sources[at] == (drawn_before[source] if drawn_before and source >= 0 else source)
            at += 1
        if row is not None and row.draw is not None:
            drawn.append(at - 1)
    assert layout.row_starts[len(rows)] == at
    assert (layout.slots[at:] == -1).all()
    assert layout.adapters is not None
    assert not layout.adapters[at:].any()
    if step.drawn is not None:
        assert step.drawn.tolist() == drawn + [0] * (len(step.drawn) - len(drawn))
    else:
        assert drawn == list(range(len(drawn)))


WINDOWS = StepLimits(vocab_size=50, max_context=64, pages=30, page_tokens=4, windows=(None, 6))


def test_each_group_has_slots_and_a_table_of_its_own() -> None:
    """Page n of group g is entry 2 n + g; the pages before a window are the first one within."""
    packer = StepPacker(WINDOWS)
    # Position 13 sees 8 .. 13 in the second group, the prompt from position 9 on 4 .. 10.
    decode = row([7], 13, [3, -1, 4, -1, 5, 15, 6, 16])
    prompt = row([8, 9], 9, [20, -1, 21, 24, 22, 25], draw=None)
    batch = StepBatch([decode, prompt])
    sizes = packer.sizes(batch)
    assert (sizes.tokens, sizes.rows, sizes.groups) == (3, 2, 2)
    for pad in (0, 1):
        sizes = StepSizes(3 + 2 * pad, 2 + 2 * pad, sizes.width + pad, sizes.drawn, groups=2)
        words = torch.full((sizes.words,), -77, dtype=torch.int64)
        packer.pack(batch, sizes, words.numpy(), chunks_at=1 + pad)
        step = view_step(words, sizes, max_row_tokens=2, max_context=14, single_rows=1)
        full, windowed = step.layouts
        assert [full.group, windowed.group] == [0, 1]
        nothing, zeros = [-1] * pad, [0] * pad
        assert full.slots.tolist() == [6 * 4 + 1, *nothing, 22 * 4 + 1, 22 * 4 + 2, *nothing]
        assert windowed.slots.tolist() == [16 * 4 + 1, *nothing, 25 * 4 + 1, 25 * 4 + 2, *nothing]
        empty = [[0] * sizes.width] * pad
        assert full.page_table.tolist() == [[3, 4, 5, 6, *zeros], *empty, [20, 21, 22, 0, *zeros], *empty]
        assert windowed.page_table.tolist() == [[15, 15, 15, 16, *zeros], *empty, [24, 24, 25, 0, *zeros], *empty]
        assert all(layout.page_table.is_contiguous() for layout in step.layouts)


@pytest.mark.parametrize("tokens", [[1], [1, 2]])
@pytest.mark.parametrize(("pages", "says"), [([1, 2, 3], "pages"), ([1, 2, 3, -1], "page id"), ([1, 2, 3, 30], "page")])
def test_a_page_that_a_group_lacks_is_refused(tokens: list[int], pages: list[int], says: str) -> None:
    packer = StepPacker(WINDOWS)
    batch = StepBatch([row(tokens, 5, pages)])
    with pytest.raises(Internal, match=says):
        packer.pack(batch, sizes := packer.sizes(batch), torch.empty(sizes.words, dtype=torch.int64).numpy())


STATES = StepLimits(vocab_size=50, max_context=64, pages=30, page_tokens=4, windows=(None, STATE, STATE))


def with_states(tokens: list[int], start: int, draw: SamplingInput | None = DRAW) -> StepRow:
    """Returns a row whose pages have the numbers n of page n, and n + 10 and n + 20 in the groups of state layers."""
    pages = [number + more for number in range(-(-(start + len(tokens)) // 4)) for more in (0, 10, 20)]
    return row(tokens, start, pages, draw=draw)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize(
    ("start", "tokens", "read", "written"), [(0, 1, -1, 0), (3, 1, 0, 0), (4, 1, 0, 1), (0, 9, -1, 2), (5, 7, 1, 2)]
)
def test_a_row_reads_the_state_before_its_first_token_and_writes_that_after_its_last(
    single: bool, start: int, tokens: int, read: int, written: int
) -> None:
    """A row of one token that samples none is packed with the chunks, though it is alike."""
    packer = StepPacker(STATES)
    rows = [with_states([7] * tokens, start, DRAW if single else None), with_states([1, 2], 0)]
    batch = StepBatch(rows)
    sizes = replace(packer.sizes(batch), rows=4, tokens=tokens + 4)
    assert (sizes.groups, sizes.states) == (1, 2)
    words = torch.full((sizes.words,), -77, dtype=torch.int64)
    packer.pack(batch, sizes, words.numpy())
    step = view_step(words, sizes, max_row_tokens=9, max_context=14, single_rows=0)
    full, first, second = step.layouts
    assert full.state_pages is None
    for layout, more in ((first, 10), (second, 20)):
        assert layout.state_pages is not None
        reads = -1 if read < 0 else read + more
        assert layout.state_pages.tolist() == [[reads, written + more], [-1, more], [-1, -1], [-1, -1]]
        assert layout.state_pages.data_ptr() % 16 == 0
        assert torch.equal(layout.slots, full.slots)
    assert [layout.group for layout in step.layouts] == [0, 1, 2]


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("entry", [4, 7])
@pytest.mark.parametrize("page", [-1, 30])
def test_a_row_that_lacks_a_state_is_refused(single: bool, entry: int, page: int) -> None:
    """Without the check, the state of a freed page would count as that of no token."""
    pages = list(with_states([7], 8).page_ids)
    pages[entry] = page
    batch = StepBatch([row([7], 8, pages, draw=DRAW if single else None)])
    packer = StepPacker(STATES)
    sizes = packer.sizes(batch)
    with pytest.raises(Internal, match="page id"):
        packer.pack(batch, sizes, np.zeros(sizes.words, dtype=np.int64))


def test_padding_rows_of_a_decode_step_have_no_states() -> None:
    packer, batch = StepPacker(STATES), StepBatch([with_states([7], 8), with_states([8], 1)])
    sizes = replace(packer.sizes(batch), rows=5, tokens=5, drawn=5)
    words = torch.full((sizes.words,), -77, dtype=torch.int64)
    packer.pack(batch, sizes, words.numpy())
    layouts = view_step(words, sizes, max_row_tokens=1, max_context=14, single_rows=5).layouts
    assert layouts[2].state_pages is not None
    assert layouts[2].state_pages.tolist() == [[21, 22], [20, 20], [-1, -1], [-1, -1], [-1, -1]]


def test_draft_tokens_and_chunks_in_one_step_are_refused_if_there_are_states() -> None:
    limits = StepLimits(vocab_size=50, max_context=64, pages=9, page_tokens=16, windows=(None, STATE))
    tokens = with_drafts([StepRow([5], 3, [0, 1], DRAW)], [[7]])
    packer = StepPacker(limits)
    assert packer.sizes(StepBatch([], tokens)).chains == 1
    with pytest.raises(Internal, match="verifies draft tokens has no chunks"):
        packer.sizes(StepBatch([StepRow([5, 6], 0, [2, 3], DRAW)], tokens))
