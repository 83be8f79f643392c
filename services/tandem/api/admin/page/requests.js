// Recent requests with their stages, as a waterfall, and the events.

import {byId, clock, make, milliseconds, row} from "./dom.js";
import {state} from "./feed.js";

const SHOWN_MAX = 25, KEPT_MAX = 50;
// The stages in the order of a request's life; those up to `wire` sum to the time to first token.
const STAGES = ["tokenize", "route", "queue", "prefill", "retry", "wire", "transfer_exposed", "first_decode", "move"];

const total = request => STAGES.reduce((sum, name) => sum + (request.stages_ms[name] ?? 0), 0);

function stages(request, longest) { // all bars have one scale
  const known = STAGES.filter(name => request.stages_ms[name] > 0);
  const bar = make("div", undefined, "stages");
  for (const name of known) {
    const part = make("i", undefined, `stage-${name}`);
    part.style.width = `${100 * request.stages_ms[name] / longest}%`;
    bar.append(part);
  }
  const told = known.map(name => `${name} ${milliseconds(request.stages_ms[name])}`).join(", ");
  bar.title = told;
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", told || "no stage has ended yet");
  const cell = make("td");
  cell.append(bar);
  return cell;
}

function shownRow(request, longest) {
  const isBad = !["stop", "length", "cancelled", "running"].includes(request.outcome);
  const outcome = make("td", request.outcome, isBad ? "bad" : "");
  if (request.error) outcome.append(make("span", `: ${request.error}`));
  const way = request.prefill_worker ? `${request.prefill_worker} → ${request.decode_worker}` : request.decode_worker;
  const pulled = request.blocks_pulled ? `, ${request.blocks_pulled} blocks over ${request.transport}` : "";
  const moved = request.moves ? `, moved ${request.moves} times` : "";
  const name = make("td", `${clock(request.created)} ${request.id.slice(0, 8)}`, "id");
  name.title = request.id;
  const cached = request.cached_tokens ? ` (${request.cached_tokens} cached)` : "";
  return row(name, outcome, make("td", `${request.prompt_tokens}${cached} + ${request.completion_tokens}`, "n"),
    make("td", milliseconds(request.ttft_ms), "n"), stages(request, longest), make("td", (way || "–") + pulled + moved),
    make("td", request.placement || "–", "why"));
}

const rows = new Map(); // a request's row, until the request or the scale changes

export function showRequests() {
  const all = [...state.requests.values()].sort((a, b) => b.created - a.created);
  for (const request of all.slice(KEPT_MAX)) state.requests.delete(request.id);
  const shown = all.slice(0, SHOWN_MAX), longest = rounded(Math.max(...shown.map(total), 1));
  const wanted = shown.map(request => {
    const known = rows.get(request.id);
    if (known && known.request === request && known.longest === longest) return known.row;
    const made = shownRow(request, longest);
    rows.set(request.id, {request, longest, row: made});
    return made;
  });
  byId("requests").tBodies[0].replaceChildren(...wanted);
  for (const id of rows.keys()) if (!shown.some(request => request.id === id)) rows.delete(id);
}

function rounded(ms) { // up, so that the scale changes seldom
  const power = 10 ** Math.floor(Math.log10(ms));
  return [1, 2, 5, 10].map(step => step * power).find(step => step >= ms);
}

export function showEvents() {
  byId("events").tBodies[0].replaceChildren(...state.events.slice(0, SHOWN_MAX).map(event =>
    row(make("td", clock(event.at), "id"), make("td", event.kind), make("td", event.about || "–", "id"),
      make("td", event.text))));
}

export function makeRequests() {
  const legend = byId("stage-legend");
  for (const name of STAGES) legend.append(make("span", undefined, `key stage-${name}`), name.replace("_", " "));
}
