"""The multi-token prediction layer of a checkpoint: its logits beside transformers' layers, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.eagle.proposer import EagleProposer
from tandem.engine.speculation.proposer import DraftSource, ProposerName, WantedDraft
from tandem.engine.steps.batch import StepBatch
from tests.factories import draw, row, tiny_engine_config, write_tiny_model
from tests.mtp_models import LAYOUTS, MtpReference, write_mtp

from .head_steps import HeadSteps, target_states

TOLERANCE = 2e-5
TOKENS = [(7 * n + n * n) % 150 + 3 for n in range(14)]


@pytest.mark.parametrize("kernels", [None, ReferenceKernels], ids=["device", "reference"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_logits_are_those_of_transformers_layers(kind: str, kernels: type[Kernels] | None, tmp_path: Path) -> None:
    folder = write_mtp(tmp_path, kind)
    config = tiny_engine_config(folder, mtp=True, kv_cache_bytes=8 << 20)
    runner = ModelRunner.load(config, kernels=kernels and kernels())
    head, reference = HeadSteps(runner), MtpReference(tmp_path, kind)
    assert head.proposer.source == DraftSource(ProposerName.MTP)
    states = head.from_target(target_states(runner, TOKENS))
    wanted_states = reference.target_states(TOKENS)
    torch.testing.assert_close(states, wanted_states, atol=TOLERANCE, rtol=TOLERANCE)
    # At each position, the token comes with the state that it was sampled from.
    tokens, given = TOKENS[1:], wanted_states[:-1]
    for _ in range(3):
        wanted, own = reference(tokens, given)
        actual = head.logits(tokens, given)
        torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=TOLERANCE)
        tokens, given = [*tokens, int(wanted[-1].argmax())], torch.cat((given, own[-1:]))
