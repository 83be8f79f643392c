// The operator's key, and calls that change the cluster. The key stays in this tab's sessionStorage.

import {byId} from "./dom.js";

const STORED = "tandem-operator-key"; // until the tab is closed, and for this origin only

export const headers = () => {
  const key = sessionStorage.getItem(STORED);
  return key ? {Authorization: `Bearer ${key}`} : {};
};

// Posts JSON to a path relative to the page. Throws an Error with the router's message.
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

// Asks for confirmation of a change; resolves to true if it is confirmed.
export function sure(text, yes) {
  const dialog = byId("sure");
  byId("sure-text").textContent = text;
  byId("sure-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise(resolve =>
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), {once: true}));
}

const TOLD_MS = 20000;
let telling = 0;

// Makes a change and shows its result for a while.
export async function change(path, body, done) {
  const told = byId("told");
  told.className = "";
  told.textContent = "Asking…";
  clearTimeout(telling);
  try {
    await post(path, body);
    told.textContent = done;
  } catch (error) {
    told.className = "bad";
    told.textContent = `Refused: ${error.message}`;
  }
  telling = setTimeout(() => { told.textContent = ""; }, TOLD_MS);
}

// A wrong key is not sent repeatedly, because the router counts failures.
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
