"""Steps of a target model and of its EAGLE head or MTP layer, whose states and logits tests compare."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.eagle.proposer import EagleProposer
from tandem.engine.steps.batch import StepBatch
from tests.factories import row


def target_states(runner: ModelRunner, token_ids: Sequence[int]) -> Tensor:
    """Return the hidden states that the runner keeps for each token of a text, which it reads token by token."""
    assert runner.drawn_hidden is not None
    kv = runner.kv_pages
    pages, states = list(range(kv.numbers(len(token_ids)) * kv.groups)), []
    for start, token in enumerate(token_ids):
        runner.run(StepBatch([row([token], start, pages)]))
        states.append(runner.drawn_hidden[0].clone())
    return torch.stack(states)


class HeadSteps:
    """The head of a runner, run on tokens and states that a test gives it."""

    def __init__(self, runner: ModelRunner) -> None:
        proposer = runner.draft_proposer and runner.draft_proposer()
        assert isinstance(proposer, EagleProposer)
        self.proposer = proposer
        self._head = proposer._head

    def from_target(self, drawn: Tensor) -> Tensor:
        """Return the states that tokens come with."""
        with torch.inference_mode():
            return self._head.from_target(drawn)

    def logits(self, token_ids: Sequence[int], states: Tensor) -> Tensor:
        """Return the head's logits [n, vocab] after each token of a context that begins with them."""
        pages = list(range(self._head.kv_pages.numbers(len(token_ids)) * self._head.kv_pages.groups))
        with torch.inference_mode():
            self._head.give(states.to(self._head.drawn_hidden.device))
            rows = [row([token], position, pages) for position, token in enumerate(token_ids)]
            logits = self._head._stepper.logits(StepBatch(rows))
        assert logits is not None
        return logits.clone()

    @property
    def drawn_hidden(self) -> Tensor:
        """The head's own states after each row of the newest step."""
        return self._head.drawn_hidden
