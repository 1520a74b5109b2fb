// The chat: sends the conversation to /v1/chat/completions and shows the answer while it is streamed.

import { askForKey, byId, element, onKey } from "./elements.js";
import { call, events, reasonOf, ServerError, setApiKey } from "./server.js";

const keyForm = byId("api-key");
let messages = [];
let running = null;

/** Fill the list of models; ask for an API key if the router requires one. */
export async function loadModels() {
  try {
    const models = (await (await call("v1/models")).json()).data;
    byId("model").replaceChildren(...models.map((model) => element("option", {}, model.id)));
    keyForm.hidden = true;
  } catch (error) {
    rejected(error);
  }
}

/** Connect the buttons and fields of the chat, each once. */
export function startChat(onNewKey) {
  onKey(keyForm, async (key) => {
    setApiKey(key);
    await loadModels();
    onNewKey();
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    sendPrompt();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      sendPrompt();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    byId("messages").replaceChildren();
  });
}

async function sendPrompt() {
  const prompt = byId("prompt");
  const text = prompt.value.trim();
  if (!text || running) {
    return;
  }
  const question = element("article", { class: "user" }, element("div", { class: "text" }, text));
  byId("messages").append(question);
  prompt.value = "";
  const conversation = messages;
  conversation.push({ role: "user", content: text });
  if (!(await answer()) && conversation === messages) {
    conversation.pop();
    question.remove();
    prompt.value ||= text;
  }
}

/** Request an answer to the conversation and show it; return false if there was none, so that nothing was added. */
async function answer() {
  const conversation = messages;
  const view = new AnswerView();
  const stopping = new AbortController();
  running = stopping;
  byId("send").hidden = true;
  byId("stop").hidden = false;
  try {
    const request = { method: "POST", body: JSON.stringify(body()), signal: stopping.signal };
    request.headers = { "content-type": "application/json" };
    for await (const event of events(await call("v1/chat/completions", request))) {
      view.add(event);
    }
    view.end();
  } catch (error) {
    if (error.name === "AbortError") {
      view.stop();
    } else {
      view.fail(error.message);
      rejected(error);
    }
  } finally {
    running = null;
    byId("send").hidden = false;
    byId("stop").hidden = true;
  }
  const message = view.message();
  if (message && conversation === messages) {
    messages.push(message);
    view.askForResults();
  }
  return message !== null;
}

function body() {
  const system = byId("system").value.trim();
  const chosen = {
    model: byId("model").value,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
  };
  if (byId("temperature").value) {
    chosen.temperature = Number(byId("temperature").value);
  }
  if (byId("max-tokens").value) {
    chosen.max_tokens = Number(byId("max-tokens").value);
  }
  const tools = byId("tools").value.trim();
  if (tools) {
    try {
      chosen.tools = JSON.parse(tools);
    } catch (error) {
      throw new ServerError(0, `the tools are not JSON: ${error.message}`);
    }
  }
  return chosen;
}

function rejected(error) {
  if (error instanceof ServerError && error.needsKey) {
    askForKey(keyForm, reasonOf(error));
  }
}

/** One answer of the assistant on the page: reasoning, text, tool calls, and a note with its figures. */
class AnswerView {
  #started = performance.now();
  #first = null;
  #text = element("div", { class: "text" });
  #reasoning = element("pre");
  #thinking = element("details", { hidden: "" }, element("summary", {}, "Reasoning"), this.#reasoning);
  #tools = element("div");
  #note = element("p", { class: "note" });
  #calls = [];
  #usage = null;
  #finish = null;
  #id = "";

  constructor() {
    byId("messages").append(element("article", { class: "assistant" }, this.#thinking, this.#text, this.#tools, this.#note));
  }

  /** Add one event of the stream. Throws a ServerError for the event of a failed request. */
  add(event) {
    if (event.error) {
      throw new ServerError(0, event.error.message);
    }
    this.#id = event.id;
    this.#usage = event.usage ?? this.#usage;
    for (const choice of event.choices) {
      this.#finish = choice.finish_reason ?? this.#finish;
      this.#addDelta(choice.delta);
    }
  }

  #addDelta(delta) {
    if (delta.content || delta.reasoning || delta.tool_calls) {
      this.#first ??= performance.now();
    }
    const log = byId("messages");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    if (delta.reasoning) {
      this.#thinking.hidden = false;
      this.#reasoning.append(delta.reasoning);
    }
    this.#text.append(delta.content ?? "");
    for (const part of delta.tool_calls ?? []) {
      this.#addCall(part);
    }
    if (atEnd) {
      log.scrollTop = log.scrollHeight;
    }
  }

  #addCall(part) {
    let known = this.#calls[part.index];
    if (!known) {
      known = { id: part.id, name: part.function.name, arguments: "", shown: element("pre"), result: element("textarea", { rows: 2 }) };
      this.#calls[part.index] = known;
      this.#tools.append(element("div", { class: "tool" }, "Tool call ", element("span", { class: "name" }, known.name), known.shown));
    }
    known.arguments += part.function.arguments ?? "";
    known.shown.textContent = known.arguments;
  }

  /** Show the figures of the answer, and `reason` or the reason why it ended. */
  end(reason = this.#finish) {
    const seconds = (performance.now() - this.#started) / 1000;
    const parts = [`${seconds.toFixed(1)} s`];
    if (this.#first !== null) {
      parts.push(`first token after ${Math.round(this.#first - this.#started)} ms`);
    }
    if (this.#usage) {
      parts.unshift(`${this.#usage.prompt_tokens} + ${this.#usage.completion_tokens} tokens`);
    }
    parts.push(reason ?? "ended", this.#id);
    this.#note.textContent = parts.filter(Boolean).join(", ");
  }

  /** Show the figures of an answer that the user stopped; remove it from the page if nothing was received. */
  stop() {
    if (this.message() === null) {
      this.#note.parentElement.remove();
    }
    this.end("stopped");
  }

  /** Show an error in place of the figures. */
  fail(message) {
    this.#note.className = "error";
    this.#note.setAttribute("role", "alert");
    this.#note.textContent = message;
  }

  /** Return the answer as a message of the conversation; null if nothing was received. */
  message() {
    const content = this.#text.textContent;
    if (!content && !this.#calls.length && this.#first === null) {
      return null;
    }
    const message = { role: "assistant", content };
    if (this.#calls.length) {
      message.tool_calls = this.#calls.map((one) => ({
        id: one.id, type: "function", function: { name: one.name, arguments: one.arguments },
      }));
    }
    return message;
  }

  /** Show a field for the result of each tool call; the button sends the results and requests the next answer. */
  askForResults() {
    if (this.#finish !== "tool_calls") {
      return;
    }
    const button = element("button", { type: "button" }, "Send results");
    const calling = messages.at(-1);
    this.#calls.forEach((one) => one.shown.after(element("label", {}, "Result ", one.result)));
    this.#tools.append(button);
    button.addEventListener("click", () => this.#sendResults(button, calling));
  }

  /** Send the results, unless the conversation has gone on without them since the message `calling`. */
  async #sendResults(button, calling) {
    if (running) {
      return;
    }
    button.hidden = true;
    if (messages.at(-1) !== calling) {
      return;
    }
    const conversation = messages;
    const before = conversation.length;
    conversation.push(...this.#calls.map((one) => ({ role: "tool", tool_call_id: one.id, content: one.result.value })));
    if (!(await answer())) {
      conversation.length = before;
      button.hidden = false;
    }
  }
}
