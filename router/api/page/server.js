// Requests to the router, with the keys that the user gave; they are kept until the tab is closed.

const API_KEY = "tandem-api-key";
const READER_KEY = "tandem-reader-key";

/** An error of the router or of the connection to it; `status` is 0 if no response came. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  /** True if another key would help. */
  get needsKey() {
    return this.status === 401 || this.status === 403;
  }
}

export function setApiKey(key) {
  sessionStorage.setItem(API_KEY, key);
}

export function setReaderKey(key) {
  sessionStorage.setItem(READER_KEY, key);
}

/** Return the response to a call of an API; throw a ServerError for every status but 200. */
export function call(path, options = {}) {
  return send(path, options, sessionStorage.getItem(API_KEY));
}

/** Like `call`, for the state of the cluster, which may require another key. */
export function read(path) {
  return send(path, {}, sessionStorage.getItem(READER_KEY) ?? sessionStorage.getItem(API_KEY));
}

/** Return the message of a ServerError about a key; "" if no key was sent, so that none was rejected. */
export function reasonOf(error) {
  return (sessionStorage.getItem(READER_KEY) ?? sessionStorage.getItem(API_KEY)) ? error.message : "";
}

async function send(path, options, key) {
  const headers = new Headers(options.headers);
  let response;
  try {
    if (key) {
      headers.set("authorization", `Bearer ${key}`);
    }
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new ServerError(0, `the router cannot be reached (${error.message}); is \`tandem up\` running?`);
  }
  if (!response.ok) {
    throw new ServerError(response.status, await messageOf(response));
  }
  return response;
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `status ${response.status}`;
  }
}

/** Yield the data of each event of a stream of server-sent events, parsed from JSON, until `[DONE]`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) {
      throw new ServerError(0, "the connection was lost before the end of the answer");
    }
    const complete = (pending + value).split("\n\n");
    pending = complete.pop();
    for (const event of complete) {
      const data = event.split("\n").find((line) => line.startsWith("data: "))?.slice("data: ".length);
      if (data === "[DONE]") {
        return;
      }
      if (data !== undefined) {
        yield JSON.parse(data);
      }
    }
  }
}
