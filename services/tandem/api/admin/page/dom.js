// Helpers that build document nodes. Text is always set as text, never as HTML.

export const byId = id => document.getElementById(id);

export function make(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  if (name) element.className = name;
  return element;
}

export function setText(element, text) { // a screen reader speaks of a change only
  if (element.textContent !== text) element.textContent = text;
}

export const byNumber = new Intl.Collator(undefined, {numeric: true}).compare; // decode-9 before decode-10

export const count = new Intl.NumberFormat(undefined).format; // 1,024

export const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export function ago(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

export const clock = at => new Date(1000 * at).toLocaleTimeString([], {hourCycle: "h23"});

export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  return ms < 10 ? `${Number(ms.toFixed(1))} ms` : ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}
