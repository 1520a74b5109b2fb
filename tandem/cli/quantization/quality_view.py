"""The table of a quality comparison between a model and its quantized version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from tandem.engine.quality.teacher_forced import Quality


def quality_table(quality: Quality) -> Table:
    """Return the table, with one row for tokens scored in prefill and one for tokens scored in decode steps."""
    table = Table(title="predictions of the same text: this model, and the one before")
    for heading in ("phase", "tokens", "KL in nats", "top-1", "perplexity", "before", "change"):
        table.add_column(heading, justify="left" if heading == "phase" else "right", no_wrap=True)
    for phase, scores in (("prefill", quality.prefill), ("decode", quality.decode)):
        table.add_row(
            phase,
            f"{scores.positions:,}",
            f"{scores.kl:.4f} ± {scores.kl_error:.4f}",
            f"{scores.top1:.2%}",
            f"{scores.candidate_perplexity:.3f}",
            f"{scores.reference_perplexity:.3f}",
            f"{scores.perplexity_change:+.2%}",
        )
    return table
