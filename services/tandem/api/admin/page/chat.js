// A chat with the model in a drawer, and the same call as a curl command for the public port.

import {byId, make, milliseconds, setText} from "./dom.js";
import {events, state} from "./feed.js";
import {post} from "./operator.js";

const ENDINGS = {
  stop: "The answer is complete (finish_reason: stop).",
  length: "The answer was cut at its token limit (finish_reason: length).",
};
const messages = []; // of this chat, until it begins anew
let running = null;

const body = text => ({
  model: state.head?.model ?? "", stream: true, max_tokens: Number(byId("tokens-max").value) || 200,
  messages: [...messages, {role: "user", content: text}],
});
const quoted = text => `'${text.replaceAll("'", `'\\''`)}'`; // for a POSIX shell

function publicUrl() {
  const {scheme, host, port} = state.head.public;
  const isOpen = ["0.0.0.0", "::", ""].includes(host);
  const name = isOpen ? location.hostname : host.includes(":") ? `[${host}]` : host;
  return `${scheme}://${name}:${port}/v1/chat/completions`;
}

export function showCurl() {
  if (!state.head) return;
  const sent = JSON.stringify(body(byId("message").value), null, 1);
  const key = state.head.public.needs_key ? `  -H "Authorization: Bearer $TANDEM_API_KEY" \\\n` : "";
  setText(byId("curl"), `curl -N ${publicUrl()} \\\n  -H 'Content-Type: application/json' \\\n${key}  -d ${quoted(sent)}`);
}

function add(text, name) {
  const line = make("p", text, name), box = byId("answers");
  box.append(line);
  box.scrollTop = box.scrollHeight;
  return line;
}

const speaker = name => add(name, "speaker");

// Adds the text of an answer to its paragraph, which is made with the first text.
function writer(name) {
  let line = null;
  return text => {
    if (!text) return;
    line ??= add("", name);
    line.append(text);
    byId("answers").scrollTop = byId("answers").scrollHeight;
  };
}

async function send() {
  const text = byId("message").value.trim();
  if (!text || running) return;
  const asked = body(text), began = performance.now(), think = writer("thought"), say = writer();
  speaker("You");
  add(text, "mine");
  speaker(asked.model || "The model");
  byId("message").value = "";
  byId("send").disabled = true;
  byId("stop").disabled = false;
  running = new AbortController();
  const {signal} = running;
  let said = "", ending = "", firstMs = null;
  try {
    const reply = await post("v1/cluster/chat", asked, signal);
    for await (const {data} of events(reply.body)) {
      if (data.error) throw new Error(data.error.message);
      const {delta = {}, finish_reason: reason} = data.choices?.[0] ?? {};
      if (delta.content || delta.reasoning_content) firstMs ??= performance.now() - began;
      think(delta.reasoning_content);
      say(delta.content);
      said += delta.content ?? "";
      if (reason) ending = ENDINGS[reason] ?? `The answer ended (finish_reason: ${reason}).`;
    }
  } catch (error) {
    if (error.name === "AbortError") ending = "You stopped the answer.";
    else add(error.message, "bad");
  }
  const first = firstMs === null ? "" : ` First token after ${milliseconds(firstMs)}, the end after ${milliseconds(performance.now() - began)}.`;
  if (running?.signal === signal) { // no new chat has begun
    if (ending) add(ending + first, "ending");
    if (said) messages.push({role: "user", content: text}, {role: "assistant", content: said});
    ready();
  }
}

function ready() {
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
  showCurl();
}

function open(isOpen) {
  byId("chat-drawer").hidden = !isOpen;
  byId("open-chat").setAttribute("aria-expanded", String(isOpen));
  byId("open-chat").hidden = isOpen; // the drawer has a button that closes it
  document.body.classList.toggle("chatting", isOpen);
  byId(isOpen ? "message" : "open-chat").focus();
}

export function makeChat() {
  byId("open-chat").addEventListener("click", () => open(byId("chat-drawer").hidden));
  byId("close-chat").addEventListener("click", () => open(false));
  byId("chat-drawer").addEventListener("keydown", event => { if (event.key === "Escape") open(false); });
  byId("chat").addEventListener("submit", event => { event.preventDefault(); send(); });
  byId("message").addEventListener("keydown", event => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("message").addEventListener("input", showCurl);
  byId("tokens-max").addEventListener("input", showCurl);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("anew").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    byId("answers").replaceChildren();
    ready();
    byId("message").focus();
  });
  byId("copy").addEventListener("click", async () => {
    let told = "Copied";
    try {
      await navigator.clipboard.writeText(byId("curl").textContent);
    } catch { // a page over plain HTTP from another machine has no clipboard
      getSelection().selectAllChildren(byId("curl"));
      told = "Selected";
    }
    setText(byId("copy"), told);
    setTimeout(() => setText(byId("copy"), "Copy"), 2000);
  });
}
