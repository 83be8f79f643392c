// Charts of the last 15 minutes, with uPlot. At most one chart is drawn in each animation frame.

import {ago, byId, color, make, milliseconds, setText} from "./dom.js";
import {state} from "./feed.js";

const SPAN_MIN_S = 60, SPAN_MAX_S = 900; // of the time axis, which begins with the first sample
const POINTS_MAX = 60; // more samples are drawn as means
const FRESH = 12; // samples: a value that is not measured all the time is shown for a minute
const number = digits => value => (value ? value.toFixed(digits) : "0");
const percent = value => {
  if (value > 0 && value < .01) return "<1%";
  return value >= .995 && value < 1 ? ">99%" : `${Math.floor(100 * value + .5)}%`; // as the answers in words
};
const DASH = [6, 3], DOT = [2, 2], DASH_DOT = [8, 3, 2, 3], LONG = [12, 4];
// Title, formatter of values, lines (column, name, color, dashes), and the time that the numbers are
// of. The colors are page.css's.
const HEALTH = [
  ["Tokens/s", number(0), [["tokens_per_s", "generated", "text"]], "in the last 5 s"],
  ["Requests", number(0), [["decoding", "decoding", "text"], ["in_prefill", "in prefill", "prefill", DASH], ["queued", "queued", "queue", DOT]], "now"],
  ["Time to first token", milliseconds, [["ttft_p50_ms", "median", "text"], ["ttft_max_ms", "slowest", "text", DASH]], "in the last minute"],
  ["Time between tokens", milliseconds, [["itl_p50_ms", "median", "text"], ["itl_p95_ms", "95%", "text", DASH]], "in the last minute"],
  ["Failures a second", number(1), [["errors_per_s", "failed", "bad"]], "in the last 5 s"],
  ["KV cache", percent, [["kv_used_share", "in use", "kv"], ["kv_cached_share", "reusable", "kv", DASH]], "now"],
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
const queue = new Map(); // chart -> what is to be done with it, in a frame of its own

const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

function draw(chart) {
  const unit = rem(), axis = {
    stroke: color("muted"), grid: {stroke: color("line"), width: 1}, ticks: {show: false}, gap: 4,
    font: `${.75 * unit}px system-ui`, size: 3.4 * unit,
  };
  const options = {
    width: chart.width, height: HEIGHT_REM * unit, legend: {show: false}, cursor: {show: false},
    padding: [.5 * unit, 1.6 * unit, 0, 0],
    scales: {x: {time: true}, y: {range: (_, low, high) => [0, chart.format === percent || !(high > 0) ? 1 : 1.1 * high]}},
    axes: [
      {...axis, size: 1.5 * unit, splits: (_, __, low, high) => [low, high], values: (_, at) => [`${ago(at[1] - at[0])} ago`, "now"]},
      {...axis, space: 2 * unit, values: (_, at) => at.map(value => compact(value, chart.format))},
    ],
    series: [{}, ...chart.lines.map(([, , name, dash]) => ({
      stroke: color(name), width: dash ? 1 : 1.6, dash, spanGaps: false, points: {show: !dash, size: 2.5, fill: color(name)},
    }))],
  };
  chart.plot?.destroy();
  chart.plot = new uPlot(options, columns(chart), chart.box);
}

function compact(value, format) {
  if (format === percent) return percent(value);
  if (format === milliseconds) return value < 1000 ? `${value} ms` : `${value / 1000} s`;
  if (value >= 10000) return `${(value / 1000).toFixed(0)}k`;
  return Number.isInteger(value) ? String(value) : value.toFixed(value < 1 ? 2 : 1);
}

// The number of samples that one point of a chart stands for.
const group = () => Math.max(1, Math.ceil(Math.min(state.samples.length, SPAN_MAX_S / state.stepS) / POINTS_MAX));

// The times and the values of a chart's points. The last point is the step that has not ended: otherwise
// a tile would have values that its chart lacks.
export function columns({lines, isHealth}) {
  const indexes = ["at", ...lines.map(([column]) => column)].map(name => state.sampleColumns.indexOf(name));
  const found = indexes.map(index => state.samples.map(sample => sample[index]));
  const last = found[0].at(-1) ?? Date.now() / 1000, first = found[0][0] ?? last;
  const means = aggregated(found, group(), lines.map(([column]) => column));
  if (isHealth && lines.every(([column]) => column in state.step) && state.now > last) { // the step that has not ended
    means[0] = [...means[0], state.now];
    lines.forEach(([column], i) => { means[i + 1] = [...means[i + 1], state.step[column]]; });
  }
  if (last - first < SPAN_MIN_S) {
    means[0].unshift(last - SPAN_MIN_S);
    for (const values of means.slice(1)) values.unshift(null);
  }
  return means;
}

// The means of `size` samples each, at the time of the last of them; for a largest value, the largest
// one. The newest samples are always in a whole group.
function aggregated(found, size, names) {
  if (size < 2) return found;
  const length = found[0].length, ends = [];
  for (let end = length; end > 0; end -= size) ends.unshift(end);
  const summary = (values, name) => {
    const known = values.filter(value => value !== null && value !== undefined);
    if (!known.length) return null;
    return name.includes("_max_") ? Math.max(...known) : known.reduce((total, value) => total + value, 0) / known.length;
  };
  return found.map((values, i) => ends.map(end => {
    const part = values.slice(Math.max(0, end - size), end);
    return i ? summary(part, names[i - 1]) : part.at(-1);
  }));
}

function latest(column) {
  const index = state.sampleColumns.indexOf(column);
  return state.samples.slice(-FRESH).map(sample => sample[index]).findLast(value => value !== null && value !== undefined);
}

function show(chart) {
  const hasData = tell(chart);
  chart.empty.hidden = hasData;
  chart.box.classList.toggle("empty", !hasData);
  const isWindow = chart.when === "in the last minute" && hasData; // longer than what a point stands for
  setText(chart.note, isWindow ? `${chart.when}; a point of the line: ${group() * state.stepS} s` : chart.when);
  if (!chart.width) return;
  if (chart.plot) chart.plot.setData(columns(chart));
  else draw(chart);
}

// Shows the numbers of a chart; returns whether a sample has one of them. A figure of the router
// takes precedence: it is of the same moment, and the same window of time, as the answers in words.
function tell(chart) {
  const told = chart.lines.map(([column, name], i) => {
    const figure = chart.isHealth ? state.figures[column] : undefined;
    const value = (figure === undefined ? latest(column) : figure) ?? undefined, text = value === undefined ? "–" : chart.format(value);
    setText(chart.values[i], text);
    return `${name} ${value === undefined ? "none" : text}`;
  });
  chart.box.setAttribute("aria-label", `${chart.title}, latest: ${told.join(", ")}`);
  return chart.lines.some(([column]) => {
    const index = state.sampleColumns.indexOf(column);
    return state.samples.some(sample => sample[index] !== null && sample[index] !== undefined);
  });
}

export const showFigures = () => charts.filter(chart => chart.isHealth).forEach(tell);

function each(work, some = charts) { // in frames of their own: no task is long
  const isIdle = !queue.size;
  for (const chart of some) queue.set(chart, (queue.get(chart) ?? new Set()).add(work));
  const step = () => {
    const [chart, works] = queue.entries().next().value ?? [];
    if (!chart) return;
    queue.delete(chart);
    if (queue.size) requestAnimationFrame(step);
    for (const part of works) part(chart);
  };
  if (isIdle && queue.size) requestAnimationFrame(step);
}

export const showCharts = () => each(show);
export const showHealth = () => each(show, charts.filter(chart => chart.isHealth));

function sample(name, dash) { // of a line, beside its name
  const svg = byId("line-sample").content.firstElementChild.cloneNode(true), line = svg.firstElementChild;
  line.style.stroke = `var(--${name})`;
  line.style.strokeDasharray = dash ?? "none";
  return svg;
}

function makeChart(isHealth, title, format, lines, when = "in the last 5 s") {
  const figure = make("figure"), values = make("div", undefined, lines.length > 3 ? "values many" : "values"), box = make("div");
  const numbers = lines.map(([, name, tone, dash]) => {
    const value = make("b", "–"), label = make("span");
    label.append(value, " ", sample(tone, dash), name);
    values.append(label);
    return value;
  });
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${title}: no data yet`);
  const empty = make("p", "no data yet", "none");
  const note = make("p", when, "none");
  figure.append(make("figcaption", title), note, values, empty, box);
  charts.push({isHealth, title, format, lines, when, note, values: numbers, empty, box, plot: null, width: 0});
  return figure;
}

export function makeCharts() {
  byId("health").append(...HEALTH.map(chart => makeChart(true, ...chart)));
  byId("charts").append(...MORE.map(chart => makeChart(false, ...chart)));
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
