// SPDX-License-Identifier: Apache-2.0
// The annotation page. All text goes into the page as text, never as HTML.
"use strict";

const LOOK_FOR = {
  identity: "the same person, animal or thing",
  style: "the same look: technique, colours, light",
  logic: "what is shown fits together",
};
const DRAG_DISTANCE = 6; // pixels from which a press is a drag and not a click

const annotator = document.body.dataset.annotator;
const find = (id) => document.getElementById(id);

let task = null; // what the server gave
let order = []; // indices of the picked candidates, best first
let spent = 0; // seconds before the page was reloaded
let shownAt = 0;
let busy = true; // keys and clicks wait until what they are for is there
let drag = null;
let dragged = false; // the click that follows the end of a drag is none
let largeByKey = false;

// ---------------------------------------------------------------- half-made orders, which survive a reload

const draftKey = () => `paco-annotation ${annotator} ${task.instance}`;

function readDraft() {
  try {
    const draft = JSON.parse(localStorage.getItem(draftKey()));
    const known = (index) => Number.isInteger(index) && index >= 0 && index < task.candidates.length;
    if (draft && draft.order.every(known) && new Set(draft.order).size === draft.order.length) return draft;
  } catch { /* storage is switched off, or has something else */ }
  return null;
}

function writeDraft() {
  try {
    localStorage.setItem(draftKey(), JSON.stringify({ order, seconds: seconds() }));
  } catch { /* then a reload begins anew */ }
}

function dropDraft() {
  try {
    localStorage.removeItem(draftKey());
  } catch { /* there is none */ }
}

const seconds = () => Math.round(spent * 10 + (performance.now() - shownAt) / 100) / 10;

// ---------------------------------------------------------------- server

async function ask(address, options) {
  let response;
  try {
    response = await fetch(address, options);
  } catch {
    throw new Error("The server does not answer. Is it still running?");
  }
  const answer = await response.json().catch(() => ({ error: `The server answered with an error (${response.status}).` }));
  if (!response.ok) throw Object.assign(new Error(answer.error), { status: response.status });
  return answer;
}

async function load(instance) {
  busy = true;
  const query = new URLSearchParams({ annotator });
  if (instance) query.set("instance", instance);
  try {
    show(await ask(`/task?${query}`));
  } catch (error) {
    // An address from another time: an instance that is no more
    if (instance && error.status === 400) return load(null);
    find("reason").textContent = error.message;
    view("failure");
  }
}

async function send(result, done) {
  busy = true;
  say("Saving …");
  try {
    const next = await ask("/annotation", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ annotator, instance: task.instance, seconds: seconds(), ...result }),
    });
    dropDraft();
    show(next);
    say(done);
  } catch (error) {
    busy = false;
    say(`Not saved. ${error.message}`, true);
  }
}

function save() {
  const left = task.candidates.length - order.length;
  if (left) return say(left === 1 ? "One candidate is left." : `${left} candidates are left.`, true);
  send({ ranking: order }, "Saved.");
}

const skip = () => send({ skipped: true }, "Skipped.");

function back() {
  if (task.previous) load(task.previous);
  else say("This is your first one.");
}

// ---------------------------------------------------------------- showing

function view(name) {
  for (const id of ["work", "thanks", "failure"]) find(id).hidden = id !== name;
}

function say(text, wrong = false) {
  find("message").textContent = text;
  find("message").classList.toggle("wrong", wrong);
}

function showProgress({ ranked, skipped, rankings, needed }) {
  find("own").textContent = `${ranked} ranked` + (skipped ? `, ${skipped} skipped` : "");
  const percent = Math.floor((100 * rankings) / needed);
  find("everyone").value = percent;
  find("percent").textContent = `${percent} %`;
  find("summary").textContent =
    `You ranked ${ranked} and skipped ${skipped}. Together you have made ${rankings} of the ${needed} rankings.`;
}

function show(next) {
  closeLarge();
  task = next;
  const query = new URLSearchParams({ annotator });
  if (task.instance) query.set("instance", task.instance);
  history.replaceState(null, "", `/?${query}`);
  showProgress(task.progress);
  if (task.instance) {
    showTask();
    view("work");
  } else {
    find("change").hidden = !task.previous;
    view("thanks");
  }
  busy = false;
}

function showTask() {
  const draft = readDraft();
  order = draft ? draft.order : task.order;
  spent = draft && draft.seconds >= 0 ? draft.seconds : 0;
  shownAt = performance.now();

  find("theme").textContent = task.theme || "How consistent are these images?";
  find("dimensions").replaceChildren(...task.dimensions.map((dimension) => {
    const item = document.createElement("li");
    const name = document.createElement("b");
    name.textContent = dimension;
    item.append(name, LOOK_FOR[dimension] ? `: ${LOOK_FOR[dimension]}` : "");
    return item;
  }));
  setPicture(find("reference"), task.reference);
  find("last-key").textContent = Math.min(task.candidates.length, 9);
  find("back").disabled = !task.previous;

  const count = task.candidates.length;
  find("work").dataset.columns = count <= 4 ? 2 : count <= 9 ? 3 : 4;
  find("candidates").replaceChildren(...task.candidates.map(({ index, image }, place) => {
    const item = find("candidate").content.cloneNode(true);
    const button = item.querySelector(".candidate");
    button.dataset.index = index;
    setPicture(button.querySelector("img"), image);
    button.querySelector(".key").textContent = place + 1;
    item.querySelector(".zoom").setAttribute("aria-label", `Show candidate ${place + 1} large`);
    return item;
  }));
  showOrder();
  say(task.skipped && !draft ? "You skipped this one." : "");
  window.scrollTo(0, 0);
}

function setPicture(image, address) {
  image.onerror = () => say("An image cannot be shown. Reload the page, or skip this one.", true);
  image.src = address;
}

const placeOf = (index) => task.candidates.findIndex((candidate) => candidate.index === index) + 1;
const imageOf = (index) => task.candidates[placeOf(index) - 1].image;

function showOrder() {
  const count = task.candidates.length;
  for (const button of document.querySelectorAll(".candidate")) {
    const index = Number(button.dataset.index);
    const rank = order.indexOf(index) + 1;
    button.setAttribute("aria-pressed", String(rank > 0));
    button.setAttribute("aria-label", `Candidate ${placeOf(index)}` + (rank ? `, at place ${rank} of ${count}` : ""));
    button.querySelector(".rank").textContent = rank || "";
  }
  find("order").replaceChildren(...task.candidates.map((_, place) => {
    const item = find("slot").content.cloneNode(true);
    const button = item.querySelector(".slot");
    item.querySelector(".place").textContent = place + 1;
    if (place >= order.length) {
      button.disabled = true;
      button.querySelector("img").remove();
      button.setAttribute("aria-label", `Place ${place + 1}, empty`);
      return item;
    }
    const index = order[place];
    button.dataset.index = index;
    button.querySelector("img").src = imageOf(index);
    button.querySelector(".key").textContent = placeOf(index);
    button.setAttribute("aria-label", `Place ${place + 1}: candidate ${placeOf(index)}. Arrow keys move it.`);
    return item;
  }));
  find("save").classList.toggle("ready", order.length === count);
}

// ---------------------------------------------------------------- making the order

function setOrder(next) {
  order = next;
  writeDraft();
  showOrder();
  say(order.length === task.candidates.length ? "All in order." : "");
}

const without = (index) => order.filter((other) => other !== index);

function toggle(index) {
  setOrder(order.includes(index) ? without(index) : [...order, index]);
}

function put(index, place) {
  const next = without(index);
  next.splice(place, 0, index);
  setOrder(next);
}

function pick(place) {
  const candidate = task.candidates[place];
  if (candidate && !order.includes(candidate.index)) setOrder([...order, candidate.index]);
}

// ---------------------------------------------------------------- large images

function openLarge(image, byKey) {
  find("large-image").src = image.src;
  find("large-image").alt = image.alt || image.closest("button")?.getAttribute("aria-label") || "";
  find("large").showModal();
  largeByKey = byKey;
}

function closeLarge() {
  largeByKey = false;
  if (find("large").open) find("large").close();
}

// Where the keyboard is, or the mouse, or else the reference
function pointedAt() {
  const element =
    document.activeElement.closest(".candidate, .slot") || document.querySelector(".picture:hover, .slot:hover");
  return element?.querySelector("img") || find("reference");
}

// ---------------------------------------------------------------- keys

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " " && (find("large").open || !onPlainControl())) event.preventDefault();
  if (busy || drag || event.repeat) return;
  if (find("large").open) return; // Escape closes it, by the browser
  if (!find("thanks").hidden) {
    if (event.key.toLowerCase() === "z") back();
    return;
  }
  if (find("work").hidden) return;
  const slot = document.activeElement.closest(".slot");
  if (/^[1-9]$/.test(event.key)) pick(Number(event.key) - 1);
  else if (event.key === "Backspace") setOrder(order.slice(0, -1));
  else if (event.key.toLowerCase() === "s") skip();
  else if (event.key.toLowerCase() === "z") back();
  else if (event.key === " " && !onPlainControl()) openLarge(pointedAt(), true);
  else if (slot && /^Arrow(Up|Left|Down|Right)$/.test(event.key)) move(slot, /Up|Left/.test(event.key) ? -1 : 1);
  else if (event.key === "Enter") {
    const focused = document.activeElement.closest(".candidate, .slot");
    // A candidate that the keyboard has gone to is picked with Enter, until all are
    if (onPlainControl() || (focused && order.length < task.candidates.length)) return;
    save();
  } else return;
  event.preventDefault();
}

// Whether the keyboard has gone to a control that has its own use for Enter and Space
function onPlainControl() {
  return Boolean(document.activeElement.closest("button, a, input")) &&
    !document.activeElement.closest(".candidate, .slot");
}

function move(slot, step) {
  const index = Number(slot.dataset.index);
  put(index, Math.max(0, order.indexOf(index) + step));
  document.querySelector(`.slot[data-index="${index}"]`).focus();
}

document.addEventListener("keydown", onKey);
document.addEventListener("keyup", (event) => {
  if (event.key !== " " || !find("large").open) return;
  event.preventDefault();
  if (largeByKey) closeLarge();
});
window.addEventListener("blur", () => largeByKey && closeLarge());

// ---------------------------------------------------------------- clicks

document.addEventListener("click", (event) => {
  if (find("large").open) return closeLarge();
  const button = event.target.closest("button");
  if (!button) return;
  // After a click with the mouse the keys are for the page again, not for this button
  if (event.detail > 0) button.blur();
  if (button.id === "again") return location.reload();
  if (busy || (dragged && event.detail > 0)) return;
  if (button.matches(".candidate, .slot")) toggle(Number(button.dataset.index));
  else if (button.matches(".zoom")) openLarge(button.parentElement.querySelector("img"), false);
  else if (button.id === "save") save();
  else if (button.id === "skip") skip();
  else if (button.id === "back" || button.id === "change") back();
});

// ---------------------------------------------------------------- dragging

document.addEventListener("pointerdown", (event) => {
  dragged = false;
  const source = event.target.closest(".candidate, .slot");
  if (!source || busy || event.button !== 0 || !event.isPrimary) return;
  drag = { source, index: Number(source.dataset.index), id: event.pointerId, x: event.clientX, y: event.clientY };
});

document.addEventListener("pointermove", (event) => {
  if (!drag || event.pointerId !== drag.id) return;
  if (!drag.ghost) {
    if (Math.hypot(event.clientX - drag.x, event.clientY - drag.y) < DRAG_DISTANCE) return;
    drag.source.setPointerCapture(drag.id);
    drag.ghost = drag.source.querySelector("img").cloneNode();
    drag.ghost.className = "ghost";
    document.body.append(drag.ghost);
    document.body.classList.add("dragging");
  }
  drag.ghost.style.left = `${event.clientX}px`;
  drag.ghost.style.top = `${event.clientY}px`;
  const place = placeUnder(event.clientX, event.clientY);
  [...find("order").children].forEach((item, number) => item.classList.toggle("target", number === place));
});

document.addEventListener("pointerup", (event) => {
  if (!drag || event.pointerId !== drag.id) return;
  const { index, ghost, source } = drag;
  endDrag();
  if (!ghost) return;
  dragged = true;
  const place = placeUnder(event.clientX, event.clientY);
  if (place !== null) put(index, place);
  else if (source.matches(".slot") && inside(find("candidates"), event.clientX, event.clientY, 0)) setOrder(without(index));
});

document.addEventListener("pointercancel", (event) => {
  if (drag && event.pointerId === drag.id) endDrag();
});

function endDrag() {
  drag.ghost?.remove();
  drag = null;
  document.body.classList.remove("dragging");
  for (const item of find("order").children) item.classList.remove("target");
}

function inside(element, x, y, margin) {
  const box = element.getBoundingClientRect();
  return x >= box.left - margin && x <= box.right + margin && y >= box.top - margin && y <= box.bottom + margin;
}

// The place in the order that is nearest to a point, if the point is on the order or close to it
function placeUnder(x, y) {
  if (!inside(find("order"), x, y, 24)) return null;
  const distances = [...find("order").children].map((item) => {
    const box = item.getBoundingClientRect();
    return Math.hypot(x - (box.left + box.right) / 2, y - (box.top + box.bottom) / 2);
  });
  return distances.indexOf(Math.min(...distances));
}

find("reference").addEventListener("load", ({ target }) => {
  find("work").style.setProperty("--ratio", target.naturalWidth / target.naturalHeight);
});

load(new URLSearchParams(location.search).get("instance"));
