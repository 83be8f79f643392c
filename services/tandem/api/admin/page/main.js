// The operators' page: one feed, and the parts that show it.

import {makeCharts, showCharts, showFigures, showHealth} from "./charts.js";
import {makeChat, showCurl} from "./chat.js";
import {ago, byId, count, make, setText} from "./dom.js";
import {follow, state} from "./feed.js";
import {launch, makePicture, showPicture} from "./picture.js";
import {makeRequests, showEvents, showRequests, someWait} from "./requests.js";
import {makeWorkers, showPools, showWorkers} from "./workers.js";

const STALE_MS = 3500;

function showHead() {
  const head = state.head, line = byId("headline");
  const lowOn = new Set([...state.workers.values()].filter(w => w.memory_is_low).map(w => w.host));
  const low = lowOn.size ? ` Memory is low on ${[...lowOn].join(", ")}.` : "";
  setText(line, head.headline + low);
  line.className = low && head.level === "good" ? "wait" : head.level; // routers of older versions tell of none
  line.className ||= head.is_well ? "good" : "bad";
  document.title = `${head.is_well ? "" : "! "}Tandem: ${head.headline}`.slice(0, 120);
}

function showFacts() {
  const head = state.head;
  if (!head) return;
  const routers = `${head.router_id}${head.num_routers > 1 ? ` of ${head.num_routers} routers` : ""}`;
  setText(byId("facts"), `${head.model} · context of ${count(head.max_model_len)} tokens · ${routers} · version ${head.version} · ` +
    `up ${ago(Math.max(0, state.now - head.started_at))} · Redis ${head.redis} ·`);
}

// Links to the pages of the other models, if the router has several.
function showModels() {
  const {model, models = []} = state.head, place = byId("models");
  place.hidden = models.length < 2;
  if (place.hidden || place.dataset.shown === String([model, ...models])) return;
  place.dataset.shown = String([model, ...models]);
  place.replaceChildren(...models.map(name => {
    const link = make("a", name);
    link.href = `?model=${encodeURIComponent(name)}`;
    if (name === model) link.setAttribute("aria-current", "page");
    return link;
  }));
}

function showAnswers() {
  for (const place of document.querySelectorAll("[data-answer]")) setText(place, state.answers[place.dataset.answer] ?? "–");
}

let wasStale = false;

function showAge() {
  const age = performance.now() - state.came;
  const isStale = !state.came || age > STALE_MS;
  const why = state.error || (state.came ? "the router sends nothing" : "");
  document.body.classList.toggle("stale", isStale);
  const told = isStale && why ? `: ${why}` : "";
  setText(byId("freshness"), state.came ? `updated ${ago(age / 1000)} ago${told}` : `no data yet${told}`);
  if (told) {
    setText(byId("headline"), `This page is not up to date${told}.`);
    byId("headline").className = "bad";
    document.title = "! Tandem: not up to date";
  } else if (wasStale && state.head) {
    showHead(); // it may be as before, and then no event has it
  }
  wasStale = isStale;
}

// Parts to redraw. Each one gets its own task, so that no task is long; a part that returns a
// function has more to draw, which gets another task.
const parts = new Map();
const PARTS = {
  head: () => { showHead(); showFacts(); showModels(); showPools(); showCurl(); },
  answers: showAnswers,
  samples: showCharts,
  figures: showFigures,
  step: showHealth,
  workers: () => { parts.set("table", showWorkers); return showPicture(); },
  requests: showRequests,
  events: showEvents,
};
let isWorking = false;

function work() {
  const [name, part] = parts.entries().next().value ?? [];
  isWorking = Boolean(part) && !document.hidden;
  if (!isWorking) return;
  parts.delete(name);
  setTimeout(work); // also if this part fails
  const rest = part();
  if (typeof rest === "function") parts.set(name, rest);
}

function show(changed, flows) {
  for (const name of changed) if (PARTS[name]) parts.set(name, PARTS[name]);
  if (document.hidden) return; // until somebody looks
  if (someWait()) parts.set("requests", showRequests); // for the time that they have waited
  if (flows.length) parts.set("flows", () => launch(flows));
  if (!changed.has("head")) showFacts();
  showAge();
  if (!isWorking) work();
}

document.addEventListener("visibilitychange", () => { if (!isWorking) work(); });
makeCharts();
makePicture();
makeWorkers();
makeRequests();
makeChat();
setInterval(showAge, 1000);
follow(show, showAge);
