"""Chooses the proposer by the setting for speculation."""

from tandem.engine.speculation.load_draft import MakeProposer
from tandem.engine.speculation.ngram import NgramProposer
from tandem.engine.speculation.proposer import Proposer
from tandem.engine.speculation.suffix import SuffixProposer
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.speculation_method import SpeculationMethod


def make_proposer(
    method: SpeculationMethod, *, asynchronous: bool, states: bool = False, trained: MakeProposer | None = None
) -> Proposer | None:
    """Return the proposer of this method; None if the engine does not speculate.

    A step that verifies draft tokens would also change the states of state layers by tokens that it then rejects, so
    models with `states` do not speculate: AUTO then means OFF, and other methods are refused with InvalidArgument.

    An `asynchronous` engine launches a step before it knows the tokens of the previous one, but draft tokens depend on
    them, so AUTO then means OFF. `trained` creates the proposer of DRAFT or MTP. Raises InvalidArgument if either is
    set and the engine has not loaded it.
    """
    if states:
        if method not in {SpeculationMethod.AUTO, SpeculationMethod.OFF}:
            raise InvalidArgument("speculate", f"{method} is not supported for models with state layers; use off.")
        return None
    if method in {SpeculationMethod.DRAFT, SpeculationMethod.MTP}:
        if trained is None and method is SpeculationMethod.MTP:
            raise InvalidArgument("speculate", "mtp: the engine has not loaded the multi-token prediction layer")
        if trained is None:
            raise InvalidArgument("draft", "is missing: it is the folder of the weights that propose drafts")
        return trained()
    if method is SpeculationMethod.AUTO:
        method = SpeculationMethod.OFF if asynchronous else SpeculationMethod.NGRAM
    if method is SpeculationMethod.SUFFIX:
        return SuffixProposer()
    return NgramProposer() if method is SpeculationMethod.NGRAM else None
