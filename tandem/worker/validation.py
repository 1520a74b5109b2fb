"""The validation of requests at a worker's gRPC service.

Routers validate requests first, but an invalid request must never reach the engine.
"""

import math

from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import (
    CACHE_RETENTION_MAX_S,
    CACHE_SALT_MAX,
    FREQUENCY_MAX,
    LOGIT_BIAS_MAX,
    LOGIT_BIASES_MAX,
    LOGPROBS_MAX,
    PRESENCE_MAX,
    PROMPT_SCORES_MAX,
    REPETITION_MAX,
    ModelFacts,
    PrefillTask,
    Reservation,
    SamplingParams,
)

ID_LENGTH_MAX = 256


def check_prefill(task: PrefillTask, model: ModelFacts) -> None:
    """Raise InvalidArgument, with the field and the limit, if the task is invalid."""
    _check(task, model)
    if task.destination is None and task.sampling.max_tokens > task.prior_output_tokens + 1:
        raise InvalidArgument("destination", "is missing, and max_tokens leaves room for more than one token")


def check_reservation(reservation: Reservation, model: ModelFacts) -> None:
    """Raise InvalidArgument, with the field and the limit, if the reservation is invalid."""
    _check(reservation, model)
    if not reservation.gap_target_s > 0:
        raise InvalidArgument("gap_target_s", f"{reservation.gap_target_s:g} is not above 0")


def _check(asked: PrefillTask | Reservation, model: ModelFacts) -> None:
    ref, sampling = asked.ref, asked.sampling
    for field, name in (("router_id", asked.router_id), ("request_id", ref.request_id)):
        if not 1 <= len(name) <= ID_LENGTH_MAX:
            raise InvalidArgument(field, f"has {len(name)} characters, must have 1 to {ID_LENGTH_MAX}")
    if len(asked.cache_salt) > CACHE_SALT_MAX:
        raise InvalidArgument("cache_salt", f"has {len(asked.cache_salt)} characters, the limit is {CACHE_SALT_MAX}")
    _check_range("retention_s", asked.retention_s, 0.0, CACHE_RETENTION_MAX_S)
    _check_range("hinted_s", asked.hinted_s, 0.0, CACHE_RETENTION_MAX_S)
    if ref.attempt < 1:
        raise InvalidArgument("attempt", f"{ref.attempt} is less than 1")
    _check_prompt(asked.prompt_token_ids, model)
    _check_sampling(sampling, model)
    if sampling.prompt_scores(asked.original_prompt_tokens) > PROMPT_SCORES_MAX:
        raise InvalidArgument("prompt_logprobs", f"asks for more than {PROMPT_SCORES_MAX} log probabilities")
    limit = min(len(asked.prompt_token_ids), sampling.max_tokens)
    if not 0 <= asked.prior_output_tokens < limit:
        raise InvalidArgument(
            "prior_output_tokens", f"{asked.prior_output_tokens} is not below prompt tokens and max_tokens, {limit}"
        )


def _check_prompt(token_ids: tuple[int, ...], model: ModelFacts) -> None:
    if not token_ids:
        raise InvalidArgument("prompt_token_ids", "is empty; send at least one token")
    if len(token_ids) >= model.max_context:
        raise InvalidArgument(
            "prompt_token_ids",
            f"has {len(token_ids)} tokens; the context of {model.max_context} leaves room for at most"
            f" {model.max_context - 1} and an answer",
        )
    if max(token_ids) >= model.vocab_size:
        raise InvalidArgument("prompt_token_ids", f"{max(token_ids)} is not in the vocabulary of {model.vocab_size}")


def _check_sampling(sampling: SamplingParams, model: ModelFacts) -> None:
    if sampling.max_tokens < 1:
        raise InvalidArgument("max_tokens", f"{sampling.max_tokens} is less than 1")
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidArgument("temperature", f"{sampling.temperature} is not a finite number >= 0")
    if not 0 < sampling.top_p <= 1:
        raise InvalidArgument("top_p", f"{sampling.top_p} is not in (0, 1]")
    if not 0 <= sampling.min_p <= 1:
        raise InvalidArgument("min_p", f"{sampling.min_p} is not in [0, 1]")
    _check_range("frequency_penalty", sampling.frequency_penalty, -FREQUENCY_MAX, FREQUENCY_MAX)
    _check_range("presence_penalty", sampling.presence_penalty, -PRESENCE_MAX, PRESENCE_MAX)
    if not 0 < sampling.repetition_penalty <= REPETITION_MAX:
        raise InvalidArgument("repetition_penalty", f"{sampling.repetition_penalty} is not in (0, {REPETITION_MAX:g}]")
    _check_range("logprobs", sampling.logprobs or 0, 0, LOGPROBS_MAX)
    _check_range("prompt_logprobs", sampling.prompt_logprobs or 0, 0, LOGPROBS_MAX)
    _check_range("min_tokens", sampling.min_tokens, 0, sampling.max_tokens)
    if len(sampling.logit_bias) > LOGIT_BIASES_MAX:
        raise InvalidArgument("logit_bias", f"has {len(sampling.logit_bias)} tokens, the limit is {LOGIT_BIASES_MAX}")
    for token_id, bias in sampling.logit_bias:
        _check_range("logit_bias", token_id, 0, model.vocab_size - 1)
        _check_range("logit_bias", bias, -LOGIT_BIAS_MAX, LOGIT_BIAS_MAX)
    strangers = [token_id for token_id in sampling.stop_token_ids if token_id >= model.vocab_size]
    if strangers:
        raise InvalidArgument("stop_token_ids", f"{strangers[0]} is not in the vocabulary of {model.vocab_size}")


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN compares false
        raise InvalidArgument(field, f"{value} is not in [{low:g}, {high:g}]")
