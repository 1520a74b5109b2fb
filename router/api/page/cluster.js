// The state of the cluster, from /cluster: what `tandem top` and `tandem why` print.

import { askForKey, byId, element, onKey } from "./elements.js";
import { read, reasonOf, setReaderKey } from "./server.js";

const PERIOD_MS = 3000;
const NONE = "–";
const OUTCOMES = { met: "met", missed_ttft: "missed TTFT", missed_itl: "missed ITL", rejected: "rejected", failed: "failed" };
const keyForm = byId("reader-key");
let timer = 0;

/** Show the cluster, now and every few seconds while the page is visible. */
export function startCluster() {
  onKey(keyForm, async (key) => {
    setReaderKey(key);
    await refresh();
  });
  document.addEventListener("visibilitychange", refresh);
  return refresh();
}

/** Fetch the figures and show them; try again later, unless a key is missing. */
export async function refresh() {
  clearTimeout(timer);
  if (document.hidden) {
    return;
  }
  let again = true;
  try {
    show(await (await read("cluster")).json());
    byId("cluster-error").textContent = "";
    keyForm.hidden = true;
  } catch (error) {
    again = !error.needsKey;
    if (error.needsKey) {
      askForKey(keyForm, reasonOf(error));
    } else {
      byId("cluster-error").textContent = error.message;
    }
  }
  await showHealth();
  clearTimeout(timer);
  if (again) {
    timer = setTimeout(refresh, PERIOD_MS);
  }
}

async function showHealth() {
  const shown = byId("health");
  try {
    const health = await (await fetch("health")).json();
    shown.textContent = health.reason ? `${health.status}: ${health.reason}` : health.status;
    shown.className = health.status === "ready" ? "" : "bad";
  } catch {
    shown.textContent = "unreachable";
    shown.className = "bad";
  }
}

function show(view) {
  byId("cluster-view").replaceChildren(
    element("p", {}, summary(view)),
    element("h2", {}, "Workers"), workers(view.workers),
    element("h2", {}, "What limits each worker"), findings(view.findings),
    element("h2", {}, "Service classes since the router's start"), classes(view.classes),
    element("h2", {}, `Latencies of the last ${view.seconds.toFixed(0)} s, in ms`), latencies(view.latencies),
  );
}

function summary(view) {
  return [
    `${view.models.join(", ")}, ${view.mode}`,
    `${view.processes_up} of ${view.processes} processes up`,
    `${view.running} running, ${view.waiting} in the queue`,
    `${view.requests_per_s.toFixed(1)} requests/s, ${view.tokens_per_s.toFixed(0)} tokens/s`,
  ].join(" · ");
}

function workers(list) {
  const heads = ["worker", "role", "state", "KV", "batch", "waiting", "decode/s", "prefill/s", "step ms", "busy", "hits", "sent MB/s", "restarts"];
  return table(heads, 4, list.map((one) => [
    one.worker, one.role, state(one.state), used(one.kv_used), one.running, one.waiting,
    one.decode_tokens_per_s.toFixed(0), one.prefill_tokens_per_s.toFixed(0), milliseconds(one.step_s),
    percent(one.busy), percent(one.prefix_hits), (one.sent_bytes_per_s / 1e6).toFixed(1), one.restarts,
  ]));
}

function findings(list) {
  return table(["worker", "bottleneck", "because", "what would help"], 4, list.map((one) => [
    one.worker, element("strong", {}, one.bottleneck), one.because, one.change,
  ]));
}

function classes(list) {
  const heads = ["class", "missed in", "goodput/s", "SLO attainment", ...Object.values(OUTCOMES)];
  return table(heads, 2, list.map((one) => {
    const counts = Object.keys(OUTCOMES).map((outcome) => one.outcomes[outcome]);
    const missed = Object.entries(one.missed_in).map(([phase, count]) => `${phase} ${count}`).join(", ");
    const all = counts.reduce((sum, count) => sum + count, 0);
    return [one.slo_class, missed || NONE, one.goodput_per_s.toFixed(2), percent(one.outcomes.met / all), ...counts];
  }));
}

function latencies(list) {
  return table(["", "mean", "p50", "p99", "count"], 1, list.map((one) => [
    one.name, milliseconds(one.mean_s), milliseconds(one.p50_s), milliseconds(one.p99_s), one.count,
  ]));
}

/** Return a table; the columns from number `numbers` on are numbers. */
function table(heads, numbers, rows) {
  const kind = (column) => (column < numbers ? {} : { class: "number" });
  const row = (cells, name) => element("tr", {}, ...cells.map((cell, i) => element(name, kind(i), typeof cell === "number" ? String(cell) : cell)));
  if (!rows.length) {
    return element("p", { class: "note" }, "none yet");
  }
  const body = element("tbody", {}, ...rows.map((cells) => row(cells, "td")));
  return element("div", { class: "table" }, element("table", {}, element("thead", {}, row(heads, "th")), body));
}

function state(text) {
  return element("span", text === "up" ? {} : { class: "bad" }, text);
}

function used(share) {
  const meter = element("meter", { min: 0, max: 1, high: 0.9, value: share });
  return element("span", { class: "used" }, meter, ` ${percent(share)}`);
}

function percent(share) {
  return share === null || Number.isNaN(share) ? NONE : `${(100 * share).toFixed(0)}%`;
}

function milliseconds(seconds) {
  return seconds === null ? NONE : (1000 * seconds).toFixed(1);
}
