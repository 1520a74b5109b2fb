"""Messages between components, as frozen dataclasses: one for each message of `proto/` that is used outside servicers.

The schemas in `proto/tandem/v1/` document every field. The modules in the order of a request: references, sampling,
leases, work, transfer, finish, events, load; and about workers: assignment, membership. Import from this package only.
"""

from tandem.protocol.messages.assignment import Assignment, Role
from tandem.protocol.messages.events import RequestEvent, RoutedEvent, RoutedTokens, StepOutput, StepTokens
from tandem.protocol.messages.finish import ErrorDetail, FinishReason
from tandem.protocol.messages.leases import GrantedLease, Lease
from tandem.protocol.messages.load import TierLoad, WorkerInspection, WorkerLoad
from tandem.protocol.messages.membership import (
    Absence,
    AdapterFacts,
    ExpectedWorker,
    Membership,
    ModelFacts,
    WorkerInfo,
)
from tandem.protocol.messages.references import PeerRef, RequestRef
from tandem.protocol.messages.sampling import (
    CACHE_RETENTION_MAX_S,
    CACHE_SALT_MAX,
    FREQUENCY_MAX,
    INT32_MAX,
    LOGIT_BIAS_MAX,
    LOGIT_BIASES_MAX,
    LOGPROBS_MAX,
    PRESENCE_MAX,
    PROMPT_SCORES_MAX,
    REPETITION_MAX,
    REPETITION_MIN,
    SEED_MAX,
    TEMPERATURE_MAX,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
)
from tandem.protocol.messages.transfer import Handshake, PageChecksum, PeerDescription, TransferNotice, hash_token_ids
from tandem.protocol.messages.work import Destination, PrefillTask, PrefixPull, PrefixSource, Reservation

__all__ = [
    "CACHE_RETENTION_MAX_S",
    "CACHE_SALT_MAX",
    "FREQUENCY_MAX",
    "INT32_MAX",
    "LOGIT_BIASES_MAX",
    "LOGIT_BIAS_MAX",
    "LOGPROBS_MAX",
    "PRESENCE_MAX",
    "PROMPT_SCORES_MAX",
    "REPETITION_MAX",
    "REPETITION_MIN",
    "SEED_MAX",
    "TEMPERATURE_MAX",
    "Absence",
    "AdapterFacts",
    "Assignment",
    "Destination",
    "ErrorDetail",
    "ExpectedWorker",
    "FinishReason",
    "GrantedLease",
    "Handshake",
    "Lease",
    "Membership",
    "ModelFacts",
    "PageChecksum",
    "PeerDescription",
    "PeerRef",
    "PrefillTask",
    "PrefixPull",
    "PrefixSource",
    "PromptLogprobs",
    "RequestEvent",
    "RequestRef",
    "Reservation",
    "Role",
    "RoutedEvent",
    "RoutedTokens",
    "SamplingParams",
    "StepOutput",
    "StepTokens",
    "TierLoad",
    "TokenLogprobs",
    "TransferNotice",
    "WorkerInfo",
    "WorkerInspection",
    "WorkerLoad",
    "hash_token_ids",
]
