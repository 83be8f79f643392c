// The picture: routers, prefill and decode workers on a canvas, with moving blocks and streams.

import {byId, color} from "./dom.js";
import {ordered, state} from "./feed.js";
import {isIll, workInPicture} from "./workers.js";

const BOXES_MAX = 12; // of a pool; more are drawn as small cells
const FLIGHT_MS = 1400, PARTICLES_MAX = 300;
const still = matchMedia("(prefers-reduced-motion: reduce)");
const FLOWS_MAX = 40; // that one event launches
const DRAWN_AT_ONCE = 200; // workers; the rest in a task of its own
const SHARES = [[.01, .17], [.27, .57], [.67, .97]]; // of the width, for each column
const NARROW = 42; // units: below this width, the groups are below each other
const ROLES = ["router", "prefill", "decode"]; // also the names of their colors
// Workers are drawn on one canvas, moving dots on a second one above it.
let box, canvas, context, above, colors = {}, places = new Map(), titles = [], particles = [], isRunning = false;
let drawn = {key: "", tones: new Map()}, last = [], members = [];
// The member to draw next, and the number left in this pass. An event starts a new pass, which
// continues from that member, so the last workers are drawn even if no pass ever ends.
let next = 0, left = 0;
let size = {width: 0, height: 0}; // of the box: to ask it would lay out the page at once
let unit = 15; // pixels of a rem: the picture grows with the text of the page
let isStacked = false; // the groups are below each other, because the picture is narrow

function readColors() {
  for (const name of ["back", "text", "muted", "good", "bad", "wait", "kv", "move", ...ROLES]) colors[name] = color(name);
}

function columnsOf() {
  const all = ordered().map(id => [id, state.workers.get(id)]);
  const of = role => all.filter(([, w]) => w.role === role);
  const routers = Array.from({length: Math.max(1, Math.min(8, state.head?.num_routers ?? 1))}, (_, i) =>
    [i ? `router (${i + 1})` : state.head?.router_id ?? "router", null]);
  const {wanted, running} = state.head?.pools?.grpc ?? {}; // replicas that serve only the gRPC API
  routers.push(...Array.from({length: Math.min(8, wanted ?? running ?? 0)}, (_, i) => [`grpc-${i}`, null]));
  return [["Routers", routers], ["Prefill", of("prefill")], ["Decode", of("decode")]];
}

// Sets a place for each member and each group's title; returns the height of the picture.
function layout(columns, width) {
  places = new Map();
  isStacked = width < NARROW * unit;
  let top = 2.4 * unit, bottom = 0;
  titles = columns.map(([, members], column) => {
    const [left, right] = isStacked ? [.6 * unit, width - .6 * unit] : SHARES[column].map(share => share * width);
    const isSmall = members.length > BOXES_MAX;
    const cell = isSmall ? Math.max(7, Math.min(1.2 * unit, Math.sqrt((right - left) * 17 * unit / members.length))) : 0;
    const perRow = isSmall ? Math.floor((right - left) / cell) : isStacked ? Math.max(1, Math.floor((right - left) / (10 * unit))) : 1;
    const boxWidth = (right - left + .5 * unit) / perRow, hasLines = column > 0 && !isSmall && boxWidth < 17 * unit;
    const step = isSmall ? cell : (hasLines ? 3.7 : 2.5) * unit, title = {x: left, y: top - unit};
    members.forEach(([id], i) => {
      const [x, y] = [left + (i % perRow) * (isSmall ? cell : boxWidth), top + Math.floor(i / perRow) * step];
      const place = isSmall ? {w: cell - 2, h: cell - 2} : {w: boxWidth - .5 * unit, h: step - .5 * unit};
      places.set(id, {x, y, ...place, isSmall, hasLines});
      bottom = Math.max(bottom, y + place.h);
    });
    if (isStacked) top = Math.max(top, bottom) + 2.6 * unit;
    return title;
  });
  return Math.max(7 * unit, bottom + unit);
}

function tone(worker, id) {
  if (!worker && state.head?.is_ready === false) return colors.bad;
  if (!worker && id.startsWith("grpc-")) return Number(id.slice(5)) < (state.head.pools.grpc.running ?? 0) ? colors.good : colors.wait;
  if (!worker) return colors.good; // it serves this page
  if (worker.state === "draining" || worker.state === "loading" || worker.state === "starting") return colors.wait;
  if (isIll(worker)) return colors.bad; // a worker that is ready may be in trouble
  return worker.state === "stopped" ? colors.muted : colors.good;
}

function told(worker) {
  if (!worker) return "";
  return worker.state === "ready" ? workInPicture(worker) : worker.state;
}

function drawWorker(id, worker, at) {
  const used = worker ? worker.kv_used_percent / 100 : 0, ill = Boolean(worker && isIll(worker));
  const key = `${worker?.state} ${ill} ${at.isSmall ? Math.round(8 * used) : `${worker?.kv_used_percent} ${told(worker)} ${tone(worker, id)}`}`;
  if (drawn.tones.get(id) === key) return; // it looks as before
  drawn.tones.set(id, key);
  context.clearRect(at.x - 2, at.y - 2, at.w + 4, at.h + 4);
  context.fillStyle = colors.back;
  context.fillRect(at.x, at.y, at.w, at.h);
  context.fillStyle = colors.kv;
  context.globalAlpha = .35;
  if (at.isSmall) context.fillRect(at.x, at.y + at.h * (1 - used), at.w, at.h * used);
  else context.fillRect(at.x, at.y + at.h - .4 * unit, at.w * used, .4 * unit); // below the texts
  context.globalAlpha = 1;
  context.strokeStyle = tone(worker, id);
  context.lineWidth = ill ? 3 : 1.5;
  context.strokeRect(at.x, at.y, at.w, at.h);
  if (at.isSmall) return;
  context.fillStyle = colors.text;
  const middle = at.y + at.h / 2 + .25 * unit, pad = .6 * unit;
  context.fillText(id, at.x + pad, at.hasLines ? at.y + 1.3 * unit : middle, at.w - 2 * pad);
  if (at.hasLines) {
    context.fillText(told(worker), at.x + pad, at.y + 2.6 * unit, at.w - 2 * pad);
    return;
  }
  context.textAlign = "right";
  context.fillText(told(worker), at.x + at.w - pad, middle, at.w * .6);
  context.textAlign = "left";
}

function drawBase() {
  const ratio = devicePixelRatio || 1, {width} = size, columns = columnsOf();
  unit = parseFloat(getComputedStyle(document.documentElement).fontSize);
  const key = [ratio, width, unit, colors.back, ...columns.flatMap(([, members]) => members.map(([id]) => id))].join();
  if (key !== drawn.key) {
    drawn = {key, tones: new Map()};
    const height = layout(columns, width);
    for (const each of [canvas, above.canvas]) { // this clears them, too
      [each.width, each.height] = [Math.round(width * ratio), Math.round(height * ratio)];
      each.style.height = `${height}px`;
      each.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    context.font = `${.88 * unit}px system-ui, sans-serif`;
    columns.forEach(([name, members], i) => {
      const {x, y} = titles[i];
      context.fillStyle = colors[ROLES[i]];
      context.fillRect(x, y - .7 * unit, .75 * unit, .75 * unit);
      context.fillStyle = colors.text;
      context.fillText(i ? `${name} workers (${members.length})` : name, x + 1.2 * unit, y);
    });
  }
  members = columns.flatMap(([, found]) => found);
  left = members.length;
  if (next >= left) next = 0;
  return drawSome;
}

// Draws some workers in their current state; returns a function that draws the others.
function drawSome() {
  for (const end = Math.max(0, left - DRAWN_AT_ONCE); left > end; left--) {
    const [id, worker] = members[next];
    drawWorker(id, worker, places.get(id));
    next = (next + 1) % members.length;
  }
  return left ? drawSome : null;
}

function drawAll() {
  for (let rest = drawBase(); rest; rest = rest());
}

function ends(source, target) {
  const from = places.get(source), to = places.get(target);
  if (!from || !to) return null;
  const center = place => ({x: place.x + place.w / 2, y: place.y + place.h / 2});
  const isRight = from.x <= to.x, isWithin = state.workers.get(source)?.role === state.workers.get(target)?.role;
  const bow = isWithin ? 4 * unit : 0; // a request that moves within a group bows out
  const a = isStacked || isWithin ? center(from) : {x: isRight ? from.x + from.w : from.x, y: center(from).y};
  const b = isStacked || isWithin ? center(to) : {x: isRight ? to.x : to.x + to.w, y: center(to).y};
  return {a, b, middle: {x: (a.x + b.x) / 2 + bow, y: (a.y + b.y) / 2}};
}

// Starts the animation of blocks and streams: [kind, source, target, number].
export function launch(flows) {
  const now = performance.now();
  for (const [kind, source, target, number] of flows.toSorted((a, b) => b[3] - a[3]).slice(0, FLOWS_MAX)) {
    const way = ends(source, target);
    if (!way || particles.length >= PARTICLES_MAX) continue;
    const many = still.matches ? 1 : Math.min(8, 1 + Math.round(Math.log2(number)));
    for (let i = 0; i < many; i++) particles.push({kind, way, began: now + i * 90, hasLine: i === many - 1});
  }
  last = flows;
  box.setAttribute("aria-label", describe());
  if (particles.length && !isRunning) { isRunning = true; requestAnimationFrame(frame); }
}

function frame(now) {
  above.clearRect(0, 0, size.width, size.height);
  particles = particles.filter(p => now < p.began + FLIGHT_MS);
  for (const [kind, name] of [["pull", "kv"], ["move", "move"]]) {
    const mine = particles.filter(p => p.kind === kind), lines = new Path2D(), dots = new Path2D();
    for (const {way: {a, b, middle}, began, hasLine} of mine) {
      const t = (now - began) / FLIGHT_MS, u = 1 - t;
      if (hasLine) { lines.moveTo(a.x, a.y); lines.quadraticCurveTo(middle.x, middle.y, b.x, b.y); }
      if (t < 0 || still.matches) continue;
      const x = u * u * a.x + 2 * u * t * middle.x + t * t * b.x;
      const y = u * u * a.y + 2 * u * t * middle.y + t * t * b.y;
      dots.rect(x - 3, y - 3, 6, 6);
    }
    above.strokeStyle = above.fillStyle = colors[name];
    above.lineWidth = kind === "pull" ? 1 : 2;
    above.globalAlpha = .4;
    above.stroke(lines);
    above.globalAlpha = 1;
    above.fill(dots);
  }
  isRunning = particles.length > 0;
  if (isRunning) requestAnimationFrame(frame);
}

function describe() {
  const numbers = new Map();
  for (const worker of state.workers.values()) {
    const key = `${worker.role} ${worker.state}${worker.state === "ready" && isIll(worker) ? " in trouble" : ""}`;
    numbers.set(key, (numbers.get(key) ?? 0) + 1);
  }
  const sum = kind => last.filter(flow => flow[0] === kind).reduce((total, flow) => total + flow[3], 0);
  const known = [...numbers].map(([key, n]) => `${n} ${key}`).join(", ") || "no worker is known";
  return `Workers: ${known}. Lately ${sum("pull")} blocks were pulled and ${sum("move")} requests moved.`;
}

// Draws the background; returns a function that draws the workers in several tasks.
export function showPicture() {
  box.setAttribute("aria-label", describe());
  return drawBase();
}

export function makePicture() {
  box = byId("picture");
  const canvases = box.querySelectorAll("canvas");
  canvas = canvases[0];
  context = canvas.getContext("2d");
  above = canvases[1].getContext("2d");
  readColors();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(); drawAll(); });
  size = {width: box.clientWidth, height: box.clientHeight};
  new ResizeObserver(([entry]) => {
    const before = size.width;
    size = {width: entry.contentRect.width, height: entry.contentRect.height};
    if (state.head && before !== size.width) drawAll(); // its own canvas sets the height
  }).observe(box);
}
