// The operator's key, and calls that change something. The key stays in this tab's sessionStorage.

import {byId} from "./dom.js";

const STORED = "tandem-operator-key"; // until the tab is closed, and for this origin only

export const headers = () => {
  const key = sessionStorage.getItem(STORED);
  return key ? {Authorization: `Bearer ${key}`} : {};
};

// Sends JSON to a path below the page's own. Throws an Error with the router's message.
export async function post(path, body, signal) {
  const answer = await fetch(path, {
    method: "POST",
    headers: {"Content-Type": "application/json", ...headers()},
    body: JSON.stringify(body),
    signal,
  });
  if (!answer.ok) throw new Error(await message(answer));
  return answer;
}

export async function message(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the router answered ${answer.status}`;
  }
}

// Asks before a change; resolves to whether it is to be made.
export function sure(text, yes) {
  const dialog = byId("sure");
  byId("sure-text").textContent = text;
  byId("sure-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise(resolve =>
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), {once: true}));
}

// Makes a change and says how it went.
export async function change(path, body, done) {
  const told = byId("told");
  told.className = "";
  told.textContent = "Asking…";
  try {
    await post(path, body);
    told.textContent = done;
  } catch (error) {
    told.className = "bad";
    told.textContent = `Refused: ${error.message}`;
  }
}

// A wrong key is not sent again and again: the router counts failures.
export function askForKey() {
  sessionStorage.removeItem(STORED);
  byId("signed-in").hidden = true;
  byId("sign-in").hidden = false;
}

export function watchKey(onKey) {
  byId("signed-in").hidden = !sessionStorage.getItem(STORED);
  byId("sign-in").addEventListener("submit", event => {
    event.preventDefault();
    sessionStorage.setItem(STORED, byId("key").value.trim());
    byId("key").value = "";
    byId("sign-in").hidden = true;
    byId("signed-in").hidden = false;
    onKey();
  });
  byId("sign-out").addEventListener("click", () => {
    sessionStorage.removeItem(STORED);
    location.reload();
  });
}
