// Charts of the last 15 minutes, with uPlot. At most one chart is drawn in each animation frame.

import {byId, color, make, setText} from "./dom.js";
import {state} from "./feed.js";

const SPAN_S = 900;
const number = digits => value => value.toFixed(digits);
const percent = value => `${(100 * value).toFixed(0)}%`;
// Title, formatter of values, and lines: column, name, color.
const CHARTS = [
  ["Requests a second", number(1), [["requests_per_s", "ended", "pull"]]],
  ["Time to first token, ms", number(0), [["ttft_p50_ms", "median", "pull"], ["ttft_p95_ms", "95%", "move"]]],
  ["Time between tokens, ms", number(1), [["itl_p50_ms", "median", "pull"], ["itl_p95_ms", "95%", "move"]]],
  ["Cached share of prompts", percent, [["cached_share", "cached", "good"]]],
  ["KV by tier, share that is held", percent, [["kv_used_share", "pool in use", "pull"],
    ["kv_cached_share", "pool cached", "muted"], ["kv_host_share", "host", "good"],
    ["kv_disk_share", "disk", "move"], ["kv_store_share", "store known", "second"]]],
  ["Reused tokens a second, by tier", number(0), [["cached_device_per_s", "pool", "pull"],
    ["cached_host_per_s", "host", "good"], ["cached_disk_per_s", "disk", "move"],
    ["cached_store_per_s", "store", "second"], ["cached_peer_per_s", "peer", "muted"]]],
  ["KV pulled, MB a second", number(1), [["pulled_mb_per_s", "MB/s", "pull"]]],
  ["Errors and moves a second", number(2), [["errors_per_s", "errors", "bad"],
    ["moves_per_s", "moves", "second"], ["cancelled_per_s", "cancelled", "muted"]]],
];
const HEIGHT = 130;
const drawn = []; // {plot, now, box, format, lines, title}
let pending = 0, boxWidth = 0; // of each chart: to ask it while drawing would lay out the page at once

function draw(chart) {
  const axis = {
    stroke: color("muted"), grid: {stroke: color("line"), width: 1}, ticks: {stroke: color("line"), width: 1},
    font: "11px system-ui", size: 44,
  };
  const options = {
    width: Math.max(200, boxWidth), height: HEIGHT, legend: {show: false}, cursor: {show: false},
    scales: {x: {time: true}, y: {range: (_, low, high) => [0, chart.format === percent || !(high > 0) ? 1 : 1.1 * high]}},
    axes: [
      {...axis, size: 24, space: 70, values: (_, at) => at.map(minute)},
      {...axis, values: (_, at) => at.map(value => compact(value, chart.format))},
    ],
    series: [{}, ...chart.lines.map(([, , name]) => ({
      stroke: color(name), width: 1.5, spanGaps: false, points: {show: true, size: 3, fill: color(name)},
    }))],
  };
  chart.plot?.destroy();
  chart.plot = new uPlot(options, columns(chart.lines), chart.box);
}

const minute = second =>
  new Date(1000 * second).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit"});

function compact(value, format) {
  if (format === percent) return percent(value);
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

function show(chart) {
  if (!chart.plot) draw(chart);
  else chart.plot.setData(columns(chart.lines));
  const latest = state.samples.at(-1);
  const told = chart.lines.map(([column, name]) => {
    const value = latest?.[state.sampleColumns.indexOf(column)];
    return [name, value === null || value === undefined ? "none" : chart.format(value)];
  });
  chart.now.forEach((element, i) => setText(element, `${told[i][0]} ${told[i][1]}`));
  chart.box.setAttribute("aria-label", `${chart.title}, latest: ${told.map(pair => pair.join(" ")).join(", ")}`);
}

function each(work) { // in frames of their own: no task is long
  const mine = ++pending;
  let next = 0;
  const step = () => {
    if (mine !== pending || next >= drawn.length) return;
    work(drawn[next++]);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

export const showCharts = () => each(show);

export function makeCharts() {
  for (const [title, format, lines] of CHARTS) {
    const figure = make("figure"), caption = make("figcaption", title), box = make("div");
    const now = lines.map(([, name, colorName]) => {
      const key = make("span", undefined, "key"), text = make("span", name, "now");
      key.style.background = `var(--${colorName})`;
      caption.append(key, text);
      return text;
    });
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", `${title}: no data yet`);
    figure.append(caption, box);
    byId("charts").append(figure);
    drawn.push({title, format, lines, now, box, plot: null});
  }
  const again = () => each(chart => { if (chart.plot) draw(chart); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  boxWidth = drawn[0].box.clientWidth;
  new ResizeObserver(([entry]) => {
    const before = boxWidth;
    boxWidth = entry.contentRect.width;
    if (before !== boxWidth) again();
  }).observe(drawn[0].box);
}
