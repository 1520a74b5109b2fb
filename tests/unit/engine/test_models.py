"""Every family against transformers in float32: same folder, same logits, for any partition of tokens into steps."""

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.engine.config.model import MixtureOfExperts
from tandem.engine.kernels import reference
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.reference import ReferenceKernels, _within_groups, choose_experts
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import parse_spec
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.protocol.kv_pages import FREED
from tests.e2e.reference import Reference
from tests.factories import FAMILIES, row, tiny_engine_config, write_tiny_model
from tests.pairwise import pairwise

TOLERANCE = 2e-5
MARGIN = 1e-4
"""The least distance of the scores of the last expert that a token chooses and of the next one."""
PROMPT = 150
SEEDS = {
    "qwen3_moe": 9,
    "gpt_oss": 9,
    "gpt_oss_unscaled": 8,
    "olmoe": 8,
    "qwen3_5_moe": 17,
    "granite_moe": 9,
    "cohere2_moe": 8,
    "minimax_m2": 8,
    "ernie4_5_moe": 9,
}
"""Seeds of weights whose routers choose clearly, where the usual one's do not."""


@functools.cache
def expected_of(folder: Path) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """Returns the logits of transformers by token ids; each is computed once for all tests of a folder."""
    return functools.cache(Reference(folder).logits)


class Case:
    """A runner with NaN in all unwritten memory, pages in random order, and transformers' logits."""

    def __init__(self, folder: Path, page_tokens: int, kernels: Kernels | None) -> None:
        config = tiny_engine_config(folder, page_tokens=page_tokens, kv_cache_bytes=8 << 20)
        self.runner = ModelRunner.load(config, kernels=kernels)
        self.runner.cache.storage.fill_(float("nan"))
        self._free = list(range(self.runner.cache.pages))
        random.Random(page_tokens).shuffle(self._free)
        self.expect = expected_of(folder)

    def pages(self, tokens: int) -> list[int]:
        kv = self.runner.cache.kv_pages
        return [self._free.pop() for _ in range(kv.numbers(tokens) * kv.groups)]

    def row(self, token_ids: list[int], start: int, pages: list[int], *, drawn: bool = True) -> StepRow:
        """Returns a row; the pages that it does not see are freed, and NaN like those that nobody has written."""
        for entry in self.runner.cache.kv_pages.dead(pages, start):
            self.runner.cache.storage[pages[entry]] = float("nan")
            pages[entry] = FREED
        return row(token_ids, start, pages, drawn=drawn)

    def check(self, actual: torch.Tensor, *ends: tuple[tuple[int, ...], int]) -> None:
        """Checks that each row of `found` is transformers' logits after so many tokens of the given ids."""
        wanted = torch.stack([self.expect(ids)[end - 1] for ids, end in ends])
        torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@functools.cache
def _ids(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(160) for _ in range(length))


def _has_experts(family: str) -> bool:
    return any(isinstance(layer.feed_forward, MixtureOfExperts) for layer in parse_spec(FAMILIES[family]).layers)


KERNELS: dict[str, Callable[[], Kernels | None]] = {"device": lambda: None, "reference": ReferenceKernels}
PAGES = [16, 128]
every_family = pairwise(family=sorted(FAMILIES), page_tokens=PAGES, kernels=KERNELS)
two_families = pairwise(family=["llama3", "smollm2"], page_tokens=PAGES, kernels=KERNELS)
"""Two families, one of them with a separate output matrix; nothing else of a family matters after the logits."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(
        lambda family: write_tiny_model(tmp_path_factory.mktemp("model"), family, seed=SEEDS.get(family, 7))
    )


@pytest.fixture
def case(
    family: str, page_tokens: int, kernels: Callable[[], Kernels | None], folder_of: Callable[[str], Path]
) -> Case:
    return Case(folder_of(family), page_tokens, kernels())


@every_family
def test_one_chunk(case: Case) -> None:
    ids = _ids(1, PROMPT)
    case.check(case.runner.logits(StepBatch([case.row(list(ids), 0, case.pages(PROMPT))])), (ids, PROMPT))


@every_family
def test_chunks_and_decode(case: Case) -> None:
    ids, pages = _ids(1, PROMPT), case.pages(PROMPT)
    for start, end in ((0, 7), (7, 8), (8, 40), (40, 140)):
        case.runner.run(StepBatch([case.row(list(ids[start:end]), start, pages, drawn=False)]))
    for at in range(140, PROMPT):
        case.check(case.runner.logits(StepBatch([case.row([ids[at]], at, pages)])), (ids, at + 1))


@every_family
def test_packed_with_others(case: Case) -> None:
    """A decode row, two chunks that draw and one that does not, all in one step; then all decode together."""
    a, b, c, d = _ids(1, PROMPT), _ids(2, 33), _ids(3, 70), _ids(4, 17)
    at, bt, ct, dt = (case.pages(len(ids) + 1) for ids in (a, b, c, d))
    case.runner.run(
        StepBatch([case.row(list(a[:100]), 0, at, drawn=False), case.row(list(c[:20]), 0, ct, drawn=False)])
    )
    mixed = [
        case.row([a[100]], 100, at),
        case.row(list(b[:32]), 0, bt),
        case.row(list(c[20:60]), 20, ct, drawn=False),
        case.row(list(d[:16]), 0, dt),
    ]
    case.check(case.runner.logits(StepBatch(mixed)), (a, 101), (b, 32), (d, 16))
    decode = [
        case.row([d[16]], 16, dt),
        case.row([a[101]], 101, at),
        case.row([c[60]], 60, ct),
        case.row([b[32]], 32, bt),
    ]
    case.check(case.runner.logits(StepBatch(decode)), (d, 17), (a, 102), (c, 61), (b, 33))


@pytest.mark.parametrize("family", [name for name in FAMILIES if _has_experts(name)])
def test_experts_are_chosen_by_a_clear_margin(
    family: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rounding could choose other experts than transformers, and parity would be chance."""
    margins: list[float] = []

    def choose(
        logits: torch.Tensor, bias: torch.Tensor | None, spec: MixtureOfExperts
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.sigmoid() if spec.router.score == "sigmoid" else logits.softmax(-1)
        ranked = _within_groups(scores if bias is None else scores + bias, spec.router).sort(-1, descending=True).values
        margins.append(float((ranked[:, spec.top_k - 1] - ranked[:, spec.top_k]).min()))
        return choose_experts(logits, bias, spec)

    monkeypatch.setattr(reference, "choose_experts", choose)
    case = Case(folder_of(family), 16, ReferenceKernels())
    margins.clear()
    case.runner.logits(StepBatch([case.row(list(_ids(1, PROMPT)), 0, case.pages(PROMPT))]))
    assert margins
    assert min(margins) > MARGIN


@two_families
def test_a_step_without_draws_has_no_logits(case: Case) -> None:
    result = case.runner.run(StepBatch([case.row([5, 6], 0, case.pages(2), drawn=False)]))
    assert list(result.token_ids) == [None]


@two_families
def test_run_is_greedy_argmax_of_logits(case: Case) -> None:
    ids, pages = _ids(5, 30), case.pages(30)
    result = case.runner.run(StepBatch([case.row(list(ids), 0, pages), case.row([3], 0, case.pages(1), drawn=False)]))
    assert list(result.token_ids) == [int(case.expect(ids)[-1].argmax()), None]
