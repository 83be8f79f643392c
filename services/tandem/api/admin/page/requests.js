// Recent requests, each with its stages as a bar and in words, and the events.

import {byId, clock, count, make, milliseconds, setText} from "./dom.js";
import {state} from "./feed.js";

const SHOWN_FIRST = 8, KEPT_MAX = 50;
// The stages in the order of a request's life: name, color, words. Those up to `wire` sum to the time
// to first token. Stages of one color are one thing to a reader.
const STAGES = [
  ["tokenize", "router", "tokenizing"], ["route", "router", "choosing workers"], ["queue", "queue", "waiting in queues"],
  ["prefill", "prefill", "prefill"], ["retry", "move", "starting again"], ["wire", "router", "sending messages"],
  ["transfer_exposed", "kv", "waiting for KV blocks"], ["first_decode", "decode", "computing the second token"],
  ["move", "move", "moving to another worker"],
];
const LEGEND = [
  ["queue", "waiting in queues"], ["prefill", "prefill: the prompt is computed, or waits behind others"], ["kv", "waiting for KV blocks"],
  ["decode", "computing the second token"], ["router", "the router and the network"], ["move", "starting again or moving"], ["rest", "no token yet"],
];
const WELL = new Set(["stop", "length", "cancelled", "running"]);
const OUTCOMES = {
  stop: "ended (stop)", length: "ended at its token limit (length)", cancelled: "cancelled by its client",
};
// Where an open request is (log.py), in the words of the tile.
const PHASES = {
  router: () => "in the router", queued: () => "queued in the router", prefill: w => `in prefill or queued at ${w}`,
  moved: w => `moved, in prefill or queued at ${w}`, decoding: w => `decoding at ${w}`,
};

const isWaiting = request => request.ttft_ms === null && request.outcome === "running";
const ageMs = request => Math.max(0, 1000 * (state.now - request.created));

function bar(request) { // on a scale of its own; the rest of a request that waits is not known yet
  const known = STAGES.filter(([name]) => request.stages_ms[name] > 0);
  const sum = known.reduce((total, [name]) => total + request.stages_ms[name], 0);
  const total = isWaiting(request) ? Math.max(sum, ageMs(request)) : sum;
  const told = known.map(([name, , words]) => `${words} ${milliseconds(request.stages_ms[name])}`).join(", ");
  const made = make("div", undefined, "bar");
  for (const [name, tone] of known) {
    const part = make("i", undefined, `key ${tone}`);
    part.style.width = `${100 * request.stages_ms[name] / total}%`;
    made.append(part);
  }
  made.title = told;
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", told || "no stage has ended yet");
  const line = make("div", undefined, "scale");
  line.append(made, make("span", total ? milliseconds(total) : ""));
  return line;
}

function progress(request) {
  if (isWaiting(request)) return `No token yet after ${milliseconds(ageMs(request))}.`;
  if (request.ttft_ms === null) return "No token came.";
  const first = `First token after ${milliseconds(request.ttft_ms)}`, tokens = request.completion_tokens;
  if (request.e2e_ms === null) return `${first}, ${count(tokens)} tokens so far.`;
  return tokens > 1 ? `${first}, all ${count(tokens)} tokens after ${milliseconds(request.e2e_ms)}.` : `${first}.`;
}

function way(request) {
  const {prefill_worker: prefill, decode_worker: last, blocks_pulled: blocks, moves} = request;
  const decode = request.first_decode_worker || last;
  if (!decode) return "";
  const pulled = blocks ? `, which pulled ${count(blocks)} KV blocks over ${request.transport}` : "";
  const moved = moves ? `; moved ${count(moves)} ${moves === 1 ? "time" : "times"}, to ${last}` : "";
  if (request.ttft_ms === null) return `Sent to ${last}, which computes the prompt or lets a prefill worker compute it.`;
  return prefill ? `Prompt on ${prefill}, tokens on ${decode}${pulled}${moved}.` : `Prompt and tokens on ${decode}${moved}.`;
}

function shown(request) {
  const item = make("li"), about = make("div"), time = make("div"), why = make("div");
  const told = PHASES[request.phase]?.(request.decode_worker) ?? OUTCOMES[request.outcome] ?? `failed: ${request.outcome}`;
  const outcome = make("div", told, WELL.has(request.outcome) ? "" : "bad");
  const cached = request.cached_tokens ? ` (${count(request.cached_tokens)} cached)` : "";
  const name = make("strong", `${clock(request.created)} ${request.kind}`);
  name.title = request.id;
  about.append(name, outcome, make("div", `${count(request.prompt_tokens)} tokens in${cached}, ${count(request.completion_tokens)} out`, "muted"));
  time.append(bar(request));
  if (request.longest && !isWaiting(request)) time.append(make("div", `Longest: ${request.longest}.`));
  time.append(make("div", request.error ? `${progress(request)} ${request.error}` : progress(request), request.error ? "bad" : "muted"));
  why.append(make("strong", request.decode_worker ? "Why there? " : "At no worker."), request.why, make("div", way(request), "muted"));
  item.append(about, time, why);
  return item;
}

const items = new Map(); // a request's item, until the request changes
let showsAll = {requests: false, events: false};

function showMore(name, all) {
  const button = byId(`${name}-more`);
  button.hidden = all.length <= SHOWN_FIRST;
  setText(button, showsAll[name] ? "Show fewer" : `Show ${all.length - SHOWN_FIRST} more`);
  return showsAll[name] ? all : all.slice(0, SHOWN_FIRST);
}

export function showRequests() {
  const all = [...state.requests.values()].sort((a, b) => b.created - a.created);
  for (const request of all.splice(KEPT_MAX)) state.requests.delete(request.id);
  const wanted = showMore("requests", all).map(request => {
    if (items.get(request.id)?.request !== request || isWaiting(request)) items.set(request.id, {request, item: shown(request)});
    return items.get(request.id).item;
  });
  byId("requests").replaceChildren(...(wanted.length ? wanted : [make("li", "No request yet.", "muted")]));
  for (const id of items.keys()) if (!state.requests.has(id)) items.delete(id);
}

export const someWait = () => [...state.requests.values()].some(isWaiting);

export function showEvents() {
  const wanted = showMore("events", state.events).map(event => {
    const item = make("li");
    item.append(make("span", clock(event.at), "muted"), make("strong", event.kind), make("span", event.about || "–"), make("span", event.text));
    return item;
  });
  byId("events").replaceChildren(...(wanted.length ? wanted : [make("li", "No event yet.", "muted")]));
}

export function makeRequests() {
  for (const [tone, words] of LEGEND) {
    const item = make("li");
    item.append(make("i", undefined, `key ${tone}`), words);
    byId("stage-legend").append(item);
  }
  for (const [name, show] of [["requests", showRequests], ["events", showEvents]]) {
    byId(`${name}-more`).addEventListener("click", () => { showsAll[name] = !showsAll[name]; show(); });
  }
}
