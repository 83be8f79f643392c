// A chat with the model, and the same call as a curl command for the public port.

import {byId, make, setText} from "./dom.js";
import {events, state} from "./feed.js";
import {post} from "./operator.js";

const messages = []; // of this chat, until it begins anew
let running = null;

const body = text => ({
  model: state.head?.model ?? "", stream: true, max_tokens: Number(byId("tokens-max").value) || 64,
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
  setText(byId("curl"), `curl -N ${publicUrl()} \\\n  -H 'Content-Type: application/json' \\\n` +
    `  -H "Authorization: Bearer $TANDEM_API_KEY" \\\n  -d ${quoted(sent)}`);
}

async function send(event) {
  event.preventDefault();
  const text = byId("message").value, asked = body(text);
  const answer = make("p", "");
  byId("answers").append(make("p", `You: ${text}`), answer);
  byId("send").disabled = true;
  byId("stop").disabled = false;
  running = new AbortController();
  let said = "";
  try {
    const reply = await post("v1/cluster/chat", asked, running.signal);
    for await (const {data} of events(reply.body)) {
      if (data.error) throw new Error(data.error.message);
      said += data.choices?.[0]?.delta?.content ?? "";
      answer.textContent = `Model: ${said}`;
    }
  } catch (error) {
    if (error.name !== "AbortError") byId("answers").append(make("p", error.message, "bad"));
  }
  if (said) messages.push({role: "user", content: text}, {role: "assistant", content: said});
  byId("send").disabled = false;
  byId("stop").disabled = true;
  running = null;
  showCurl();
}

export function makeChat() {
  byId("chat").addEventListener("submit", send);
  byId("message").addEventListener("input", showCurl);
  byId("tokens-max").addEventListener("input", showCurl);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("anew").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    byId("answers").replaceChildren();
    showCurl();
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
