// Charts of the last 15 minutes, with uPlot. At most one chart is drawn in each animation frame.

import {byId, color, make, milliseconds, setText} from "./dom.js";
import {state} from "./feed.js";

const SPAN_S = 900;
const FRESH = 12; // samples: a value that is not measured all the time is shown for a minute
const number = digits => value => (value ? value.toFixed(digits) : "0");
const percent = value => `${(100 * value).toFixed(0)}%`;
const DASH = [6, 3], DOT = [2, 2], DASH_DOT = [8, 3, 2, 3], LONG = [12, 4];
// Title, formatter of values, and lines: column, name, color, dashes. The colors are page.css's.
const HEALTH = [
  ["Tokens/s", number(0), [["tokens_per_s", "generated", "decode"]]],
  ["Requests", number(0), [["running", "running", "decode"], ["waiting", "waiting", "wait"]]],
  ["Time to first token", milliseconds, [["ttft_p50_ms", "median", "text"], ["ttft_p95_ms", "95%", "text", DASH]]],
  ["Time between tokens", milliseconds, [["itl_p50_ms", "median", "text"], ["itl_p95_ms", "95%", "text", DASH]]],
  ["Errors a second", number(1), [["errors_per_s", "failed", "bad"]]],
  ["KV cache", percent, [["kv_used_share", "in use", "kv"], ["kv_cached_share", "reusable", "kv", DASH]]],
];
const MORE = [
  ["Requests that ended, a second", number(1), [["requests_per_s", "all", "text"], ["cancelled_per_s", "cancelled", "text", DASH]]],
  ["Requests that moved, a second", number(1), [["moves_per_s", "moved", "move"]]],
  ["Cached share of prompts", percent, [["cached_share", "cached", "kv"]]],
  ["KV by tier, share that is held", percent, [["kv_used_share", "pool in use", "kv"],
    ["kv_cached_share", "pool cached", "kv", DASH], ["kv_host_share", "host", "kv", DOT],
    ["kv_disk_share", "disk", "kv", DASH_DOT], ["kv_store_share", "store known", "kv", LONG]]],
  ["Reused tokens a second, by tier", number(0), [["cached_device_per_s", "pool", "kv", DASH],
    ["cached_host_per_s", "host", "kv", DOT], ["cached_disk_per_s", "disk", "kv", DASH_DOT],
    ["cached_store_per_s", "store", "kv", LONG], ["cached_peer_per_s", "peer", "kv"]]],
  ["KV pulled, MB a second", number(1), [["pulled_mb_per_s", "pulled", "kv"]]],
];
const HEIGHT_REM = 6.5;
const charts = []; // {plot, width, box, values, format, lines, title}
let pending = 0;

const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

function draw(chart) {
  const unit = rem(), axis = {
    stroke: color("muted"), grid: {stroke: color("line"), width: 1}, ticks: {show: false}, gap: 4,
    font: `${.75 * unit}px system-ui`, size: 3.4 * unit,
  };
  const options = {
    width: chart.width, height: HEIGHT_REM * unit, legend: {show: false}, cursor: {show: false},
    padding: [.5 * unit, 1.4 * unit, 0, 0],
    scales: {x: {time: true}, y: {range: (_, low, high) => [0, chart.format === percent || !(high > 0) ? 1 : 1.1 * high]}},
    axes: [
      {...axis, size: 1.5 * unit, space: 4.5 * unit, values: (_, at) => at.map(minute)},
      {...axis, space: 2 * unit, values: (_, at) => at.map(value => compact(value, chart.format))},
    ],
    series: [{}, ...chart.lines.map(([, , name, dash]) => ({
      stroke: color(name), width: dash ? 1 : 1.6, dash, spanGaps: false, points: {show: !dash, size: 2.5, fill: color(name)},
    }))],
  };
  chart.plot?.destroy();
  chart.plot = new uPlot(options, columns(chart.lines), chart.box);
}

const minute = second =>
  new Date(1000 * second).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", hourCycle: "h23"});

function compact(value, format) {
  if (format === percent) return percent(value);
  if (format === milliseconds) return value < 1000 ? `${value} ms` : `${value / 1000} s`;
  if (value >= 10000) return `${(value / 1000).toFixed(0)}k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(value < 1 ? 2 : 1);
}

function columns(lines) {
  const indexes = ["at", ...lines.map(([column]) => column)].map(name => state.sampleColumns.indexOf(name));
  const found = indexes.map(index => state.samples.map(sample => sample[index]));
  const last = found[0].at(-1) ?? Date.now() / 1000;
  if (found[0].length && found[0][0] > last - SPAN_S) { // always the same span of time
    found[0].unshift(last - SPAN_S);
    for (const values of found.slice(1)) values.unshift(null);
  }
  return found;
}

function latest(column) {
  const index = state.sampleColumns.indexOf(column);
  return state.samples.slice(-FRESH).map(sample => sample[index]).findLast(value => value !== null && value !== undefined);
}

function show(chart) {
  const told = chart.lines.map(([column, name], i) => {
    const value = latest(column), text = value === undefined ? "–" : chart.format(value);
    setText(chart.values[i], text);
    return `${name} ${value === undefined ? "none" : text}`;
  });
  chart.box.setAttribute("aria-label", `${chart.title}, latest: ${told.join(", ")}`);
  if (!chart.width) return;
  if (chart.plot) chart.plot.setData(columns(chart.lines));
  else draw(chart);
}

function each(work) { // in frames of their own: no task is long
  const mine = ++pending;
  let next = 0;
  const step = () => {
    if (mine !== pending || next >= charts.length) return;
    work(charts[next++]);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

export const showCharts = () => each(show);

function sample(name, dash) { // of a line, beside its name
  const svg = byId("line-sample").content.firstElementChild.cloneNode(true), line = svg.firstElementChild;
  line.style.stroke = `var(--${name})`;
  line.style.strokeDasharray = dash ?? "none";
  return svg;
}

function makeChart(title, format, lines) {
  const figure = make("figure"), values = make("div", undefined, lines.length > 2 ? "values many" : "values"), box = make("div");
  const numbers = lines.map(([, name, tone, dash]) => {
    const value = make("b", "–"), label = make("span");
    label.append(value, " ", sample(tone, dash), name);
    values.append(label);
    return value;
  });
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${title}: no data yet`);
  figure.append(make("figcaption", title), values, box);
  charts.push({title, format, lines, values: numbers, box, plot: null, width: 0});
  return figure;
}

export function makeCharts() {
  byId("health").append(...HEALTH.map(chart => makeChart(...chart)));
  byId("charts").append(...MORE.map(chart => makeChart(...chart)));
  const drawn = new Map(charts.map(chart => [chart.box, chart]));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => each(chart => { if (chart.plot) draw(chart); }));
  const watch = new ResizeObserver(entries => {
    for (const {target, contentRect} of entries) {
      const chart = drawn.get(target), before = chart.width;
      chart.width = Math.floor(contentRect.width);
      if (chart.plot && chart.width !== before) { chart.plot.destroy(); chart.plot = null; }
    }
    showCharts();
  });
  for (const box of drawn.keys()) watch.observe(box);
}
