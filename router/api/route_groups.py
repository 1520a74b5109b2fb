"""The groups of HTTP routes, under which `/docs` and `/openapi.json` list them."""

from enum import StrEnum


class Group(StrEnum):
    """A group of routes, in the order of the page; its value is the heading."""

    OPENAI = "OpenAI API"
    ANTHROPIC = "Anthropic API"
    MODELS = "Models and adapters"
    TOKENS = "Tokens"
    PROBES = "Probes"
    STATE = "State and metrics"


DESCRIPTIONS = {
    Group.OPENAI: "Chat and text completions, and the Responses API.",
    Group.ANTHROPIC: "The Messages API.",
    Group.MODELS: "The served model, its LoRA adapters, and the version of Tandem; operators load and unload adapters.",
    Group.TOKENS: "The tokenizer: text to token ids and back, as in vLLM.",
    Group.PROBES: "Whether the router is alive and would serve a request. Probes need no key.",
    Group.STATE: "The figures of the cluster, for readers and operators: metrics, traces, workers and bottlenecks.",
}
