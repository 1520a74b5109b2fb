"""The mutants of `make mutants` still apply: each replaces a text that its file has once, and its tests exist."""

import ast

import pytest

from tests.mutants.__main__ import MUTANTS
from tests.mutants.mutant import ROOT, Mutant


def test_there_are_sixty_mutants_and_none_twice() -> None:
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS) >= 60
    assert len({mutant.promise for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.promise for mutant in MUTANTS])
def test_a_mutant_applies(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    mutated = mutant.mutated(source)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)), "the mutant changes nothing"
    assert [name for name in mutant.tests if not (ROOT / name).exists()] == []


def test_a_text_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="has this 0 times"):
        Mutant("", "file.py", "old", "new", ()).mutated("text")
