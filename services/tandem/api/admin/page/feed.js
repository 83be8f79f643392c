// The live feed: server-sent events over fetch, because EventSource cannot send a key.

import {byNumber} from "./dom.js";
import {askForKey, headers, message, watchKey} from "./operator.js";

const RETRY_FIRST_MS = 500, RETRY_MAX_MS = 10000;
const SILENCE_MAX_MS = 15000; // an event comes each second; a network that is cut ends no stream
const SAMPLES_MAX = 180;

// The state of the page. `came` is when the last event arrived, by this machine's clock.
export const state = {
  head: null, workers: new Map(), requests: new Map(), events: [], answers: {}, figures: {}, step: {},
  samples: [], sampleColumns: [], workerColumns: [], stepS: 5, now: 0, came: 0, error: "",
};

// Objects created this way share one hidden class; a worker's row arrives every second.
function object(columns, values) {
  const made = {};
  for (let i = 0; i < columns.length; i++) made[columns[i]] = values[i];
  return made;
}

let order = [], isSorted = true;

function put(id, worker) {
  const before = state.workers.get(id);
  if (!before) order.push(id);
  isSorted &&= Boolean(before) && before.pool === worker.pool;
  state.workers.set(id, worker);
}

function remove(id) {
  if (state.workers.delete(id)) order = order.filter(other => other !== id);
}

// Lists the ids of workers by pool and number. Only changed ids are sorted in: comparing the names
// of a thousand workers takes longer than drawing them.
export function ordered() {
  const pool = id => state.workers.get(id).pool;
  if (!isSorted) order.sort((a, b) => (pool(a) === pool(b) ? byNumber(a, b) : pool(a) < pool(b) ? -1 : 1));
  isSorted = true;
  return order;
}

// Applies an event to the state; returns the parts that changed.
export function take(kind, data) {
  const changed = new Set(["now"]);
  state.now = data.now;
  if (kind === "full") {
    state.workerColumns = data.worker_columns;
    state.sampleColumns = data.sample_columns;
    state.stepS = data.step_s;
    state.workers.clear();
    order = [];
    state.requests.clear();
    state.samples = [];
    for (const part of ["workers", "requests", "samples"]) changed.add(part);
  }
  for (const part of ["head", "events", "answers", "figures", "step"]) if (data[part]) { state[part] = data[part]; changed.add(part); }
  for (const [id, values] of Object.entries(data.workers ?? {})) {
    put(id, object(state.workerColumns, values));
    changed.add("workers");
  }
  for (const id of data.gone ?? []) { remove(id); changed.add("workers"); }
  for (const request of data.requests ?? []) { state.requests.set(request.id, request); changed.add("requests"); }
  if (data.samples?.length) {
    state.samples.push(...data.samples);
    state.samples.splice(0, state.samples.length - SAMPLES_MAX);
    changed.add("samples");
  }
  return changed;
}

// Yields {kind, data} for each event of a stream of server-sent events.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const kind = lines.find(line => line.startsWith("event: "))?.slice(7) ?? "message";
      const data = lines.filter(line => line.startsWith("data: ")).map(line => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield {kind, data: JSON.parse(data)};
    }
  }
}

// Reads the feed and reconnects forever. Calls `show(changed, flows)` for each event and `tell()` for
// an error.
export function follow(show, tell) {
  let retryMs = RETRY_FIRST_MS, wake = () => {};
  const run = async () => {
    for (;;) {
      const silence = new AbortController();
      let timer = 0;
      const listen = () => {
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(new Error("the router sends nothing")), SILENCE_MAX_MS);
      };
      try {
        listen();
        const answer = await fetch(`v1/cluster/live${location.search}`, {headers: headers(), signal: silence.signal});
        if (answer.status === 401 || answer.status === 403) {
          state.error = await message(answer);
          clearTimeout(timer);
          tell();
          askForKey();
          await new Promise(resolve => { wake = resolve; }); // until there is a key
          continue;
        }
        if (!answer.ok) throw new Error(await message(answer));
        for await (const {kind, data} of events(answer.body)) {
          listen();
          retryMs = RETRY_FIRST_MS;
          state.error = "";
          state.came = performance.now();
          show(take(kind, data), data.flows ?? []);
        }
      } catch (error) {
        const {aborted, reason} = silence.signal; // the body of an answer has an error of its own
        state.error = aborted ? reason.message : error instanceof TypeError ? "the router does not answer" : error.message;
        tell();
      } finally {
        clearTimeout(timer);
      }
      await new Promise(resolve => { wake = resolve; setTimeout(resolve, retryMs); });
      retryMs = Math.min(RETRY_MAX_MS, 2 * retryMs);
    }
  };
  watchKey(() => wake());
  run();
}
