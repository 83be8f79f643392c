// The lists of workers and pools, with controls for operators.

import {byId, count, make, setText} from "./dom.js";
import {ordered, state} from "./feed.js";
import {change, sure} from "./operator.js";

const ITEMS_MAX = 20;
const FEW = 8; // so few workers are found without a filter
const WELL = new Set(["ready", "draining", "stopped"]), CHANGING = new Set(["loading", "starting", "draining"]);
const items = [];
let first = 0;

const NOTED = new Set(["ready", "stopped"]); // a note is what is wrong
export const isIll = worker => !WELL.has(worker.state) || (NOTED.has(worker.state) && worker.note);

function found() {
  const words = byId("worker-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = ([id, w]) => words.every(word =>
    `${id} ${w.pool} ${w.role} ${w.state} ${w.host}`.toLowerCase().includes(word));
  const rank = w => (isIll(w) ? 0 : w.state === "draining" ? 1 : w.state === "stopped" ? 3 : 2);
  const ranked = [[], [], [], []];
  for (const id of ordered()) {
    const each = [id, state.workers.get(id)];
    if (matches(each)) ranked[rank(each[1])].push(each);
  }
  return ranked.flat();
}

const NAMES = ["name", "state", "work", "kv", "host", "tools"];

// Items are created once and updated, because a worker's numbers change every second.
function makeItem() {
  const cells = Object.fromEntries(NAMES.map(name => [name, make("div", undefined, name)]));
  const tools = ["role", "drain"].map(() => make("button"));
  cells.levels = []; // of the pool, then of each tier
  cells.id = make("strong");
  cells.role = make("div", "", "muted");
  cells.name.append(cells.id, cells.role);
  cells.tools.append(...tools);
  for (const tool of tools) tool.type = "button";
  [cells.toRole, cells.drain] = tools;
  cells.item = make("li");
  cells.item.append(...NAMES.map(name => cells[name]));
  return cells;
}

function makeLevel() {
  const line = make("div", undefined, "level"), bar = make("span", undefined, "bar"), text = make("span"), part = make("i", undefined, "key kv");
  bar.append(part);
  line.append(bar, text);
  return {line, text, part};
}

function showLevel(level, share, text) {
  setText(level.text, text);
  level.part.style.width = `${Math.min(100, Math.round(100 * share))}%`;
}

// A store has no size limit; this is the number of its blocks that a worker remembers.
const tierText = (name, held, total, share) =>
  name === "store" ? `store ${count(held)} known` : `${name} ${Math.round(100 * share)}% of ${count(total)}`;

const listed = parts => parts.filter(([number]) => number).map(([number, what]) => `${count(number)} ${what}`).join(", ") || "idle";

// A request belongs to its decode worker, so a prefill worker has prompts, and an encode worker images.
const imagesOf = w => (w.role === "encode" ? [[w.decoding + w.queued, "images"]] : []);
const requestsOf = w => (w.role !== "decode" ? [] : [[w.decoding, "decoding"], [w.in_prefill, "in prefill"], [w.queued, "queued"]]);
const promptsOf = w => [[w.queued_tokens, "prompt tokens to compute"]];

export function workInPicture(w) {
  if (w.role !== "prefill") return listed(requestsOf(w));
  return w.leases && !w.queued_tokens ? `KV of ${count(w.leases)} held for a pull` : listed(promptsOf(w));
}

const work = w => listed([...requestsOf(w), ...imagesOf(w), [w.leases, w.leases === 1 ? "lease" : "leases"], ...promptsOf(w)]);

function fill(cells, [id, w]) {
  const ill = isIll(w), other = w.role === "prefill" ? "decode" : "prefill";
  const low = w.memory_is_low ? " (memory is low)" : "";
  setText(cells.id, id);
  const pool = w.pool && w.pool !== w.role ? ` (of ${w.pool})` : "", ranks = w.ranks > 1 ? `, ${w.ranks} ranks` : "";
  setText(cells.role, w.role + pool + ranks);
  setText(cells.state, w.state + (w.note ? `: ${w.note}` : "") + low);
  cells.state.className = low ? "bad" : CHANGING.has(w.state) ? "wait" : ill ? "bad" : w.state === "ready" ? "good" : "";
  setText(cells.work, w.address ? work(w) : "");
  const tiers = w.tiers ?? []; // routers of older versions tell of none
  while (cells.levels.length <= tiers.length) {
    cells.levels.push(makeLevel());
    cells.kv.append(cells.levels.at(-1).line);
  }
  showLevel(cells.levels[0], w.kv_used_percent / 100, `${w.kv_used_percent}% in use`);
  cells.levels.slice(1).forEach((level, i) => {
    level.line.hidden = i >= tiers.length;
    if (level.line.hidden) return;
    const [name, held, total] = tiers[i], share = total ? held / total : 0;
    showLevel(level, share, tierText(name, held, total, share));
  });
  setText(cells.host, [w.host && `on ${w.host}`, w.transports && `pulls KV over ${w.transports}`].filter(Boolean).join("; "));
  cells.drain.hidden = !w.address;
  cells.kv.hidden = cells.toRole.hidden = !w.address || w.role === "encode"; // it has no KV and keeps its role
  cells.item.className = w.address ? "" : "gone";
  if (cells.shown === `${id} ${other}`) return;
  cells.shown = `${id} ${other}`;
  setText(cells.toRole, `Switch to ${other}`);
  cells.toRole.setAttribute("aria-label", `Switch to ${other}: ${id}`);
  cells.toRole.dataset.key = `role ${id}`;
  setText(cells.drain, "Drain");
  cells.drain.setAttribute("aria-label", `Drain ${id}`);
  cells.drain.dataset.key = `drain ${id}`;
}

export function showWorkers() {
  const all = found(), list = byId("workers");
  first = Math.max(0, Math.min(first, Math.floor((all.length - 1) / ITEMS_MAX) * ITEMS_MAX));
  const shown = all.slice(first, first + ITEMS_MAX);
  const focused = list.contains(document.activeElement) ? document.activeElement.dataset.key : "";
  while (items.length < shown.length) { items.push(makeItem()); list.append(items.at(-1).item); }
  while (items.length > shown.length) items.pop().item.remove();
  shown.forEach((each, i) => fill(items[i], each));
  if (focused && document.activeElement.dataset.key !== focused) { // its worker has another item now
    list.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus({preventScroll: true});
  }
  byId("workers-head").hidden = !shown.length;
  byId("worker-finder").hidden = state.workers.size <= FEW;
  byId("workers-pager").hidden = !state.workers.size || (all.length > 0 && all.length <= ITEMS_MAX);
  setText(byId("workers-shown"), all.length ? `${first + 1} to ${first + shown.length} of ${all.length}` : "no worker fits");
  byId("workers-back").hidden = byId("workers-on").hidden = all.length <= ITEMS_MAX;
  byId("workers-back").disabled = first === 0;
  byId("workers-on").disabled = first + shown.length >= all.length;
}

// The row of a pool is created once, and a size that is being typed is kept until it is sent.
export function showPools() {
  const box = byId("pools");
  for (const [name, pool] of Object.entries(state.head.pools)) {
    let form = box.querySelector(`[data-pool="${CSS.escape(name)}"]`);
    if (!form) {
      form = make("form", undefined, "pool");
      form.dataset.pool = name;
      const size = make("input"), label = make("label", `${name}: `);
      size.type = "number";
      size.min = "0";
      size.addEventListener("input", () => { form.dataset.isEdited = "yes"; });
      label.append(size);
      form.append(label, make("button", "Scale"), make("span", "", "muted"));
      // The number of gRPC replicas follows the routers and cannot be set.
      if (name === "grpc") form.replaceChildren(make("span", "grpc: "), make("span", "", "muted"));
      form.addEventListener("submit", event => scale(event, name, size));
      box.append(form);
    }
    const size = form.querySelector("input");
    if (size && !form.dataset.isEdited) size.value = pool.wanted ?? pool.running ?? 0;
    const others = Object.entries(pool.others ?? {}).map(([state, number]) => `, ${number} ${state}`).join("");
    const ready = name === "router" || name === "grpc" ? "" : `, ${pool.ready} ready${others}`;
    // The controller counts a process later than it serves. One router runs, because it serves this page.
    const running = Math.max(pool.running ?? 0, pool.ready ?? 0, name === "router" ? 1 : 0);
    setText(form.lastChild, `${running}${pool.wanted === null ? "" : ` of ${pool.wanted}`} running${ready}`);
  }
  showAutoscale();
}

// The autoscaler's last decisions with their reasons; the figures behind them are in the tooltip.
function showAutoscale() {
  const {mode = "off", decisions = []} = state.head.autoscale, line = byId("autoscale");
  const short = decisions.map(each => each.why.split(";")[0]).join("; ");
  line.hidden = mode === "off";
  setText(line, `Autoscaler (${mode}): ${short || "it has decided nothing yet"}`);
  line.title = decisions.map(each => each.why).join("\n");
}

async function scale(event, name, size) {
  event.preventDefault();
  if (!await sure(`Scale the ${name} pool to ${size.value}?`, "Scale")) return;
  const {group} = state.head; // the pools of a further model have the name of its group before
  await change("v1/cluster", {[group ? `${group}.${name}` : name]: Number(size.value)}, `The ${name} pool is asked for ${size.value}.`);
  delete size.form.dataset.isEdited;
}

async function act(key) {
  const [action, id] = key.split(/ (.*)/), worker = state.workers.get(id), path = `v1/cluster/workers/${encodeURIComponent(id)}`;
  if (!worker) return;
  if (action === "role") {
    const role = worker.role === "prefill" ? "decode" : "prefill";
    if (!await sure(`Move ${id} to the ${role} pool?`, "Move")) return;
    await change(`${path}/role`, {role}, `${id} is in the ${role} pool.`);
  } else {
    if (!await sure(`Drain ${id}? Its streams move to other workers, then it ends.`, "Drain")) return;
    await change(`${path}/drain`, {}, `${id} drains.`);
  }
}

export function makeWorkers() {
  byId("worker-filter").addEventListener("input", () => { first = 0; showWorkers(); });
  byId("workers-back").addEventListener("click", () => { first -= ITEMS_MAX; showWorkers(); });
  byId("workers-on").addEventListener("click", () => { first += ITEMS_MAX; showWorkers(); });
  byId("workers").addEventListener("click", event => {
    const key = event.target.closest("button")?.dataset.key;
    if (key) act(key);
  });
}
