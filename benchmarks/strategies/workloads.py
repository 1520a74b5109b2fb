"""The loads of the strategy table, each with the first rate of its sweep in requests per second and worker."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.strategies.conversations import Conversations, Documents
from tandem.cli.load.synthetic import Lengths, Synthetic
from tandem.cli.load.trace import read_trace
from tandem.cli.load.workload import Source
from tandem.protocol.errors import InvalidArgument

_SIGMA = 0.8
"""Standard deviation of the logarithm of lengths: half of them are within a factor of 1.7 of the median."""
_SIGMA_OF_DOCUMENTS = 0.3
_TRACE_RATE = 0.5
_TRACE_RATES = {"mooncake-conversation": 0.125}
"""First rates of traces with very long prompts, each of which keeps a worker busy for half a second."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A named workload with the first rate of its sweep, at which every strategy meets its targets."""

    name: str
    source: Source
    first_rate: float


def chosen_offers(every: Sequence[Offer], names: str) -> list[Offer]:
    """Return the workloads named in `names`, comma-separated; an empty text names all."""
    wanted = names.split(",") if names else [offer.name for offer in every]
    for name in wanted:
        if name not in {offer.name for offer in every}:
            known = ", ".join(offer.name for offer in every)
            raise InvalidArgument("--workloads", f"{name!r} is not one of {known}; a trace needs --trace")
    return [offer for offer in every if offer.name in wanted]


def _uses(scale: float) -> list[Offer]:
    """Return the loads of common uses; chat, agents and RAG share prefixes."""

    def lengths(mean: float, sigma: float = _SIGMA) -> Lengths:
        return Lengths(mean * scale, sigma)

    system, agent_system, rag_system = (round(tokens * scale) for tokens in (500, 8000, 300))
    chat = Conversations("chat", system, lengths(300), lengths(500), lengths(250), turns=6, pause_s=8.0)
    agents = Conversations("agents", agent_system, lengths(2000), lengths(800), lengths(200), turns=20, pause_s=2.0)
    rag = Documents("rag", rag_system, 1000, 5, lengths(800), lengths(50), lengths(200))
    doc_qa = Synthetic(lengths(10_000, _SIGMA_OF_DOCUMENTS), lengths(100))
    return [
        Offer("doc-qa", doc_qa, 0.75),
        Offer("chat", chat, 2.0),
        Offer("agents", agents, 1.5),
        Offer("rag", rag, 1.5),
    ]


def offers(traces: Sequence[Path], scale: float, slowdown: float) -> list[Offer]:
    """Return the synthetic workloads and each trace, with lengths times `scale` and rates divided by `slowdown`.

    Both factors are 1 for one H200 and an 8B shape.
    """
    for option, value in (("--length-scale", scale), ("--slowdown", slowdown)):
        if not 0 < value < math.inf:
            raise InvalidArgument(option, f"{value:g} is not above 0")
    balanced = Synthetic(Lengths(2000 * scale, _SIGMA), Lengths(500 * scale, _SIGMA))
    decode_heavy = Synthetic(Lengths(1000 * scale, _SIGMA), Lengths(3000 * scale, _SIGMA))
    all_offers = [Offer("balanced", balanced, 1.0), Offer("decode-heavy", decode_heavy, 0.5), *_uses(scale)]
    for file in traces:
        name = file.stem.replace("_", "-")
        all_offers.append(Offer(name, read_trace(file).scaled(scale), _TRACE_RATES.get(name, _TRACE_RATE)))
    return [Offer(offer.name, offer.source, offer.first_rate / slowdown) for offer in all_offers]
