"""Agents in their newest versions, each in a tool loop against a running cluster.

`.ci/client_environments` installs them, and `make soak` runs them; the commands are those of docs/guides/agents.md.
The model calls a tool by weights made by hand, and only a result that came back to it has the word that it answers
with (`tests.tool_calling_model`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.soak import soak
from tests.tool_calling_model import write_tool_calling_model

pytestmark = soak
MODEL, WORD = "caller", "xylophone-4711"
CONTEXT = 40_960
"""It holds the prompt of each agent, but not with the 32,000 tokens of an answer that Claude Code asks for."""
CLAUDE_ANSWER_TOKENS = 32_000
AGENT_TEST_S = 1440.0
"""The time limit of a test, in which the agents may be installed."""
QUESTION = "Which word does notes.txt say?"
CALLS = {
    "Bash": {"command": "cat notes.txt", "description": "Reads the notes"},
    "exec_command": {"cmd": "cat notes.txt"},
    "bash": {"command": "cat ./notes.txt", "description": "Reads notes"},
    "get_word": {"language": "English"},
}
"""The calls that the model knows: of Claude Code, Codex, opencode, and of the tool runners of Anthropic's SDKs."""
PYTHON_RUNNER = """
import sys
import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)

@anthropic.beta_tool
def get_word(language: str) -> str:
    "Returns the word."
    assert language == "English"
    return f"The word is {sys.argv[2]}."

for stream in (False, True):
    question = {"role": "user", "content": "Which word is it?"}
    runner = client.beta.messages.tool_runner(
        model="caller", max_tokens=200, tools=[get_word], messages=[question], stream=stream
    )
    (block,) = runner.until_done().content
    assert block.text == f"It is {sys.argv[2]}", block
"""
NODE_RUNNER = """
import assert from 'node:assert';
import Anthropic from '@anthropic-ai/sdk';
import { betaTool } from '@anthropic-ai/sdk/helpers/beta/json-schema';

const [url, word] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: 'unused', maxRetries: 0 });
const tool = betaTool({
  name: 'get_word',
  description: 'Returns the word.',
  inputSchema: { type: 'object', properties: { language: { type: 'string' } }, required: ['language'] },
  run: async ({ language }) => {
    assert.equal(language, 'English');
    return `The word is ${word}.`;
  },
});
for (const stream of [false, true]) {
  const messages = [{ role: 'user', content: 'Which word is it?' }];
  const runner = client.beta.messages.toolRunner({ model: 'caller', max_tokens: 200, tools: [tool], messages, stream });
  const [block] = (await runner.runUntilDone()).content;
  assert.equal(block.text, `It is ${word}`);
}
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def url(running_cluster: Callable[..., Any], model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URL of a cluster that serves the model."""
    folder = tmp_path_factory.mktemp("caller")
    write_tool_calling_model(folder, model_folder, CALLS, WORD, context=CONTEXT)
    cluster = running_cluster(model=folder, served_model_names=(MODEL,), dtype="float32", page_tokens=16)
    return f"http://{cluster.http_address}"


@pytest.fixture
def home(tmp_path: Path) -> str:
    """An empty home folder; the word is in a file of the working folder."""
    (tmp_path / "notes.txt").write_text(f"The word is {WORD}.\n")
    (tmp_path / "home").mkdir()
    return str(tmp_path / "home")


def events(output: str) -> list[dict[str, Any]]:
    """Returns the JSON lines of an agent's output."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.timeout(AGENT_TEST_S)
def test_claude_code(run: Run, url: str, home: str) -> None:
    """It asks for more tokens than the context leaves, and again for fewer, as the error has the words it parses."""
    output = run(
        *("agents", "claude", "-p", QUESTION, "--output-format", "stream-json", "--verbose"),
        HOME=home,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="unused",
        ANTHROPIC_API_KEY="",
        ANTHROPIC_MODEL=MODEL,
        CLAUDE_CODE_MAX_OUTPUT_TOKENS=str(CLAUDE_ANSWER_TOKENS),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    messages = events(output)
    assert messages[-1]["result"] == f"It is {WORD}", output
    first = next(message["message"] for message in messages if message["type"] == "assistant")
    assert [(block["name"], block["input"]) for block in first["content"]] == [("Bash", CALLS["Bash"])]
    assert first["usage"]["input_tokens"] + CLAUDE_ANSWER_TOKENS > CONTEXT


@pytest.mark.timeout(AGENT_TEST_S)
def test_codex(run: Run, url: str, home: str) -> None:
    """It always offers tools in a namespace and a search that only its own servers run."""
    folder = Path(home) / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "tandem"\n'
        f'[model_providers.tandem]\nname = "Tandem"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    # The sandbox of the container is enough for a command that only reads a file.
    options = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    output = run("agents", "codex", "exec", *options, QUESTION, HOME=home, CODEX_HOME=str(folder))
    items = [event["item"] for event in events(output) if event["type"] == "item.completed"]
    (command,) = (item for item in items if item["type"] == "command_execution")
    assert command["aggregated_output"] == f"The word is {WORD}.\n"
    assert (items[-1]["type"], items[-1]["text"]) == ("agent_message", f"It is {WORD}"), output


@pytest.mark.timeout(AGENT_TEST_S)
def test_opencode(run: Run, url: str, home: str, tmp_path: Path) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "unused"},
        "models": {MODEL: {"limit": {"context": CONTEXT, "output": 4096}}},
    }
    config = {"model": f"tandem/{MODEL}", "autoupdate": False, "provider": {"tandem": provider}}
    (tmp_path / "opencode.json").write_text(json.dumps(config))
    output = run(
        *("agents", "opencode", "run", "--format", "json", QUESTION), HOME=home, OPENCODE_DISABLE_MODELS_FETCH="1"
    )
    parts = [event["part"] for event in events(output)]
    (call,) = (part for part in parts if part["type"] == "tool")
    assert (call["tool"], call["state"]["output"]) == ("bash", f"The word is {WORD}.\n")
    assert [part["text"] for part in parts if part["type"] == "text"] == [f"It is {WORD}"], output


@pytest.mark.timeout(AGENT_TEST_S)
def test_aider(run: Run, url: str, home: str) -> None:
    """It offers no tools: files are a part of its prompt."""
    quiet = ("--no-git", "--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")
    output = run(
        *("aider-chat", "aider", "--model", f"openai/{MODEL}", *quiet, "--message", QUESTION, "notes.txt"),
        HOME=home,
        OPENAI_API_BASE=f"{url}/v1",
        OPENAI_API_KEY="unused",
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    assert f"It is {WORD}" in output


@pytest.mark.timeout(AGENT_TEST_S)
def test_the_tool_runner_of_anthropics_python_sdk(run: Run, url: str) -> None:
    """It begins a thread, and sends the whole conversation where threads are refused in Anthropic's form."""
    run("anthropic", "python", "-c", PYTHON_RUNNER, url, WORD)


@pytest.mark.timeout(AGENT_TEST_S)
def test_the_tool_runner_of_anthropics_node_sdk(run: Run, url: str, environments: Path, tmp_path: Path) -> None:
    """The same as in Python."""
    (tmp_path / "node_modules").symlink_to(environments / "agents" / "node_modules")
    (tmp_path / "runner.mjs").write_text(NODE_RUNNER)
    run("agents", "node", "runner.mjs", url, WORD)
