"""Mutants of answers: order of tokens, attempts, stop strings, ends, sampling and seeds."""

from tests.mutants.mutant import Mutant

_SAMPLER_TESTS = ("tests/unit/engine/test_sampler.py",)
_ROUTER_TESTS = ("tests/unit/router/test_attempts.py", "tests/unit/router/test_defects.py")
_STOP_TESTS = ("tests/unit/router/text",)

MUTANTS = (
    Mutant(
        "events of earlier attempts are dropped",
        "router/requests/live_requests.py",
        "request.attempt == attempt and ",
        "",
        (*_ROUTER_TESTS, "tests/unit/router/test_generate.py"),
    ),
    Mutant(
        "a repeated token that differs ends the answer with an error",
        "router/requests/assembler.py",
        "            elif token_id != self._token_ids[index]:\n",
        "            elif False:\n",
        _ROUTER_TESTS,
    ),
    Mutant(
        "tokens after a gap wait for the gap",
        "router/requests/assembler.py",
        "        if first_index == len(self._token_ids) and not self._early:\n",
        "        if first_index >= len(self._token_ids):\n",
        ("tests/unit/router",),
    ),
    Mutant(
        "an answer ends only when all its tokens have arrived",
        "router/requests/assembler.py",
        "self._finish is not None and self.count >= self._finish_at",
        "self._finish is not None",
        ("tests/unit/router",),
    ),
    Mutant(
        "a new attempt forgets the end of the earlier one",
        "router/requests/assembler.py",
        "        self._early.clear()\n        self._finish = None\n",
        "        self._early.clear()\n",
        ("tests/unit/router",),
    ),
    Mutant(
        "a stop string is found across pieces",
        "router/text/stop_strings.py",
        "        self._held = text[len(text) - keep :]\n        return text[: len(text) - keep]",
        '        self._held = ""\n        return text',
        _STOP_TESTS,
    ),
    Mutant(
        "the text ends before the stop string",
        "router/text/stop_strings.py",
        "text[: at + len(stop)] if self._include else text[:at]",
        "text[: at + len(stop)]",
        _STOP_TESTS,
    ),
    Mutant(
        "the first of several stop strings ends the text",
        "router/text/stop_strings.py",
        "key=lambda hit: (hit[0], -len(hit[1]))",
        "key=lambda hit: (-hit[0], -len(hit[1]))",
        _STOP_TESTS,
    ),
    Mutant(
        "held text is sent at the end",
        "router/text/stop_strings.py",
        '        held, self._held = self._held, ""\n        return held\n',
        '        self._held = ""\n        return ""\n',
        _STOP_TESTS,
    ),
    Mutant(
        "an answer has at most max_tokens tokens",
        "tandem/protocol/ending.py",
        "        return None if index + 1 < self.limit else FinishReason.LENGTH\n",
        "        return None if index < self.limit else FinishReason.LENGTH\n",
        ("tests/unit/decode_worker", "tests/unit/worker/test_life_of_a_request.py"),
    ),
    Mutant(
        "an answer has at least min_tokens tokens",
        "tandem/protocol/ending.py",
        "        if token_id in self.stops and index >= self.least:\n",
        "        if token_id in self.stops:\n",
        ("tests/unit/worker", "tests/unit/decode_worker"),
    ),
    Mutant(
        "ignore_eos ignores the end of the sequence",
        "tandem/protocol/ending.py",
        "        if not sampling.ignore_eos:\n",
        "        if True:\n",
        ("tests/unit/worker", "tests/unit/decode_worker"),
    ),
    Mutant(
        "each position of an answer has a random number of its own",
        "tandem/engine/steps/seeded.py",
        "start_of(seed) + (index + 1) * _GOLDEN) >>",
        "start_of(seed) + _GOLDEN) >>",
        _SAMPLER_TESTS,
    ),
    Mutant(
        "another seed gives another answer",
        "tandem/engine/steps/seeded.py",
        "    return _mix(seed & _MASK)\n",
        "    return _mix(0)\n",
        _SAMPLER_TESTS,
    ),
    Mutant(
        "temperature divides the logits",
        "tandem/engine/sampler.py",
        "torch.softmax((wide - peaks) / temperature, dim=-1)",
        "torch.softmax((wide - peaks), dim=-1)",
        _SAMPLER_TESTS,
    ),
    Mutant(
        "top_p keeps the token that reaches it",
        "tandem/engine/sampling_filters.py",
        "(cumulative - best < top_p * total)",
        "(cumulative < top_p * total)",
        _SAMPLER_TESTS,
    ),
    Mutant(
        "min_p removes unlikely tokens",
        "tandem/engine/sampling_filters.py",
        " & (best >= min_p * best[:, :1])",
        "",
        _SAMPLER_TESTS,
    ),
    Mutant(
        "logits that are not finite give no token",
        "tandem/engine/sampler.py",
        "torch.where(peaks.squeeze(-1).isfinite(), best, NO_TOKEN)",
        "best",
        (*_SAMPLER_TESTS, "tests/unit/worker/test_non_finite_logits.py"),
    ),
    Mutant(
        "penalties change the logits",
        "tandem/engine/sampler.py",
        "        logits = penalize(logits, draws)\n",
        "        pass\n",
        _SAMPLER_TESTS,
    ),
    Mutant(
        "a request without a seed has one that no other request has",
        "router/requests/validation.py",
        "random.getrandbits(64) if options.seed is None",
        "0 if options.seed is None",
        ("tests/unit/router/api", "tests/unit/router/test_generate.py"),
    ),
)
