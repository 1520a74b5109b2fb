"""Adds prompt scoring to a packed step."""

from dataclasses import replace

import torch

from tandem.engine.steps.batch import StepBatch
from tandem.engine.steps.prompt_scoring import Logprobs, PromptScores, StepScoring
from tandem.engine.steps.step_packer import PackedStep


def with_scoring(step: PackedStep, batch: StepBatch, logprobs: Logprobs) -> PackedStep:
    """Return `step` with the prompt scoring of its `batch`, and with the scored positions appended to `drawn`."""
    rows: list[tuple[PromptScores, list[int]]] = []
    positions: list[int] = []
    first = len(batch.tokens)
    for row in batch.chunks:
        if row.scores is not None:
            following = [*row.scores.next_tokens(row.start, len(row.token_ids))]
            rows.append((row.scores, following))
            positions += range(first, first + len(following))
        first += len(row.token_ids)
    device = step.token_ids.device
    targets = [token_id for _, some in rows for token_id in some]
    columns = torch.tensor((positions, targets), dtype=torch.int64, pin_memory=device.type == "cuda")
    places, target_ids = columns.to(device, non_blocking=True)
    drawn = torch.arange(len(step.token_ids), device=device) if step.drawn is None else step.drawn
    scoring = StepScoring(rows, target_ids, len(drawn), logprobs)
    return replace(step, drawn=torch.cat((drawn, places)), scoring=scoring)
