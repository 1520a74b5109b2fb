"""Counts the answers that validate against JSON schemas: `python -m benchmarks.quality.structured_output`.

SmolLM2 answers 200 generated schemas of growing difficulty, greedily. Every answer must validate, or be cut at its
limit. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from jsonschema import Draft202012Validator
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import at_least, exit_on_error
from benchmarks.results import run_facts, save_result
from benchmarks.speculation.local_worker import Answer, LocalWorker
from router.text.chat_template import ChatTurn
from router.text.tokenizer import Tokenizer
from tandem.cli.models.default_model import find_default_model
from tandem.engine.config import EngineConfig
from tandem.engine.model_runner import ModelRunner
from tandem.engine.weights.gguf import prepare_model
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.tokenizers.grammars import Grammars, of_json_schema

KV_BYTES = 1280 << 20
LEVELS = 10
NAMES = ("name", "age", "city", "tags", "price", "active", "date", "items", "parent", "note", "kind", "count")

Schema = dict[str, Any]


def schemas(number: int) -> Iterator[tuple[int, Schema]]:
    """Yield so many schemas, each with its level from 0, spread evenly over the levels."""
    for index in range(number):
        level = index * LEVELS // number
        draw = random.Random(index)
        if level == LEVELS - 1 and draw.random() < 0.5:
            yield level, _recursive(draw)
        else:
            yield level, _object(draw, level, depth=level // 3)


def _object(draw: random.Random, level: int, depth: int) -> Schema:
    """Return an object's schema: more properties, kinds and depth with the level."""
    names = draw.sample(NAMES, 1 + min(level, 8))
    properties = {name: _value(draw, level, depth) for name in names}
    required = names if level < 4 else draw.sample(names, draw.randint(1, len(names)))
    closed = {"additionalProperties": False} if draw.random() < 0.8 or level < 4 else {}
    return {"type": "object", "properties": properties, "required": required, **closed}


def _value(draw: random.Random, level: int, depth: int) -> Schema:
    plain: list[Schema] = [
        {"type": "string", "maxLength": draw.randint(5, 30)},
        {"type": "integer", "minimum": 0, "maximum": draw.randint(9, 9999)},
        {"type": "boolean"},
        {"enum": draw.sample(["red", "green", "blue", 1, 2.5, None, "a longer value"], 3)},
    ]
    harder: list[Schema] = [
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"},
        {"type": "string", "format": draw.choice(["date", "uuid", "ipv4", "time"])},
        {"type": "number", "minimum": -1, "exclusiveMaximum": 100},
        {"type": ["string", "null"], "minLength": 1, "maxLength": 12},
        {"const": draw.choice(["fixed", 7, True])},
        {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 6}]},
    ]
    kinds = plain + (harder if level > 1 else [])
    if depth > 0 and draw.random() < 0.4:
        if draw.random() < 0.5:
            return _object(draw, min(level, 3), depth - 1)
        items = _value(draw, level, depth - 1)
        return {"type": "array", "items": items, "minItems": draw.randint(0, 2), "maxItems": draw.randint(2, 4)}
    return draw.choice(kinds)


def _recursive(draw: random.Random) -> Schema:
    node = _object(draw, 2, 0)
    node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def outcome(schema: Schema, text: str, *, cut: bool) -> str:
    """Return "valid", "cut" for an answer that reached its limit, or "invalid"."""
    try:
        value = json.loads(text)
    except ValueError:
        return "cut" if cut else "invalid"
    checker = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return "valid" if checker.is_valid(value) else "cut" if cut else "invalid"


def mask_s(grammars: Grammars, grammar: str, answer: Sequence[int]) -> float:
    """Return the mean seconds of processor time of one mask, over all tokens of an answer."""
    state = grammars.begin(grammar)
    begun = time.process_time()
    for length in range(len(answer)):
        state.allowed(answer[:length])
    return (time.process_time() - begun) / max(1, len(answer))


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Answer all schemas; returns the figures, by level and in all."""
    folder = prepare_model(find_default_model())
    engine = EngineConfig(folder, dtype="float32", kv_cache_bytes=KV_BYTES, max_batch_requests=options.batch)
    runner, tokenizer = ModelRunner.load(engine), Tokenizer(folder)
    grammars = Grammars(folder, runner.facts.vocab_size, runner.facts.eos_token_ids)
    levels = [Counter[str]() for _ in range(LEVELS)]
    masks: list[float] = []
    compiled: list[float] = []
    async with LocalWorker.open(runner, engine, SpeculationMethod.OFF) as worker:
        asked = schemas(options.schemas)
        while batch := list(islice(asked, options.batch)):
            sent: list[tuple[int, Schema, str, Answer]] = []
            for level, schema in batch:
                grammar = of_json_schema(schema)
                begun = time.process_time()
                grammars.check(grammar)
                compiled.append(time.process_time() - begun)
                turn = ChatTurn("user", f"Make up an example of JSON with this schema:\n{json.dumps(schema)}")
                prompt = tokenizer.encode_chat((turn,))
                sampling = SamplingParams(options.tokens, grammar=grammar)
                sent.append((level, schema, grammar, worker.send(prompt, sampling)))
            await asyncio.gather(*(answer.finished.wait() for *_, answer in sent))
            for level, schema, grammar, answer in sent:
                ids = answer.token_ids
                cut = ids[-1] not in runner.facts.eos_token_ids
                levels[level][outcome(schema, tokenizer.decode(ids), cut=cut)] += 1
                masks.append(mask_s(grammars, grammar, ids))
    total = sum(levels, Counter[str]())
    return {
        "schemas": options.schemas,
        "outcomes": dict(total),
        "by_level": [dict(each) for each in levels],
        "compile_ms": {"mean": 1e3 * sum(compiled) / len(compiled), "most": 1e3 * max(compiled)},
        "mask_us": {"mean": 1e6 * sum(masks) / len(masks), "most_of_an_answer": 1e6 * max(masks)},
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--schemas", type=at_least(LEVELS), default=200, help="number of schemas")
    parser.add_argument("--batch", type=at_least(1), default=8, help="answers at a time")
    parser.add_argument("--tokens", type=at_least(1), default=200, help="most tokens of an answer")
    parser.add_argument("--save", action="store_true", help="save the figures in benchmarks/results")
    options = parser.parse_args()
    with exit_on_error():
        figures = asyncio.run(measure(options))
    table = Table("level", "valid", "cut", "invalid")
    for level, counts in enumerate(figures["by_level"]):
        table.add_row(str(level), *(str(counts.get(name, 0)) for name in ("valid", "cut", "invalid")))
    Console().print(table)
    result = {**run_facts("cpu"), "model": "SmolLM2-135M-Instruct", "dtype": "float32", **figures}
    if options.save:
        save_result("structured-output", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
