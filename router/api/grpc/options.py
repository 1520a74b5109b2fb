"""Parses `GenerationOptions`."""

from __future__ import annotations

from typing import Any

from router.requests.answer_format import AnswerFormat
from router.requests.request import Options
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import inference_pb2
from tandem.tokenizers.grammar_process import GrammarKind


def generation_options(message: inference_pb2.GenerationOptions) -> Options:
    """Return the options, unchecked; InvalidArgument for a format without content."""

    def given(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None

    return Options(
        max_tokens=given("max_tokens"),
        temperature=given("temperature"),
        top_k=given("top_k"),
        top_p=given("top_p"),
        min_p=given("min_p"),
        seed=given("seed"),
        n=given("n"),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        include_stop=message.include_stop_str_in_output,
        speculate=message.speculate if message.HasField("speculate") else True,
        ignore_eos=message.ignore_eos,
        frequency_penalty=given("frequency_penalty"),
        presence_penalty=given("presence_penalty"),
        repetition_penalty=given("repetition_penalty"),
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        add_special_tokens=given("add_special_tokens"),
        truncate_prompt_tokens=given("truncate_prompt_tokens"),
        priority=message.priority,
        slo_class=message.slo_class,
        cache_salt=message.cache_salt,
        answer_format=_answer_format(message.response_format) if message.HasField("response_format") else None,
    )


def _answer_format(message: inference_pb2.ResponseFormat) -> AnswerFormat:
    kind = message.WhichOneof("format")
    if kind is None:
        raise InvalidArgument("response_format", "has no format; leave it out for any text")
    value = tuple(message.choice.texts) if kind == GrammarKind.CHOICE else getattr(message, kind)
    return AnswerFormat(f"response_format.{kind}", GrammarKind(kind), value)
