"""How many answers one more long step would cost their target, beside a plain count."""

import random

from router.long_gaps import LongGaps


def test_answers_that_long_steps_would_break_are_counted() -> None:
    dice = random.Random(11)
    gaps, spares = LongGaps(0.01), []
    for _ in range(2000):
        match dice.randrange(4):
            case 0 | 1:
                spares.append(gaps.add(dice.randrange(6)))
            case 2 if spares:
                gaps.remove(spares.pop(dice.randrange(len(spares))))
            case 3 if dice.random() < 0.2:
                gaps.note(dice.randrange(1, 4), 0.02, 0.0)
        steps = dice.randrange(1, 5)
        assert gaps.broken_by(steps) == sum(gaps.passed <= level < gaps.passed + steps for level in spares)
