"""The choice of a proposer."""

from tandem.engine.speculation.load_draft import MakeProposer
from tandem.engine.speculation.ngram import NgramProposer
from tandem.engine.speculation.proposer import Proposer
from tandem.engine.speculation.suffix import SuffixProposer
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.speculation_method import SpeculationMethod


def make_proposer(
    method: SpeculationMethod, *, asynchronous: bool, trained: MakeProposer | None = None
) -> Proposer | None:
    """Return a proposer; None if steps have no drafts.

    `asynchronous` steps are launched before the tokens of the last one are here, which a step with drafts cannot be.
    `trained` makes the proposer of DRAFT; InvalidArgument if that has none.
    """
    if method is SpeculationMethod.DRAFT:
        if trained is None:
            raise InvalidArgument("draft", "is missing: it is the folder of the weights that propose drafts")
        return trained()
    if method is SpeculationMethod.AUTO:
        method = SpeculationMethod.OFF if asynchronous else SpeculationMethod.NGRAM
    if method is SpeculationMethod.SUFFIX:
        return SuffixProposer()
    return NgramProposer() if method is SpeculationMethod.NGRAM else None
