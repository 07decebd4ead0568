"use strict";
// The labelling page. One item at a time: `state` is what the server sent, `draft` what the labeller has chosen so far.
// Every text of a reply goes through textContent. A label stays in localStorage until the server has it on its disk.

const $ = (id) => document.getElementById(id);
const RETRY_MS = 1000, POLL_MS = 2000, MANY_CHARACTERS = 3000;
const QUESTIONS = {
  pick: "Which reply is the best?",
  rank: "Put the replies in order, the best first.",
  rate: "How good is each reply?",
  good: "Is each reply good or bad?",
};
const PLACES = ["1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th", "9th"];

let token = "", labeller = "", state = null, draft = null, focus = 0, busy = false, poll = 0, noticeTimer = 0;
let watch = { seconds: 0, since: 0 };

// --- small helpers ---------------------------------------------------------------------------------------------------

function make(tag, kind, text) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function button(kind, text, act, label) {
  const made = make("button", kind, text);
  made.type = "button";
  made.tabIndex = -1;
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", (event) => { event.stopPropagation(); act(); });
  return made;
}

function remember(name, value) {
  try {
    if (value === null) localStorage.removeItem(name);
    else localStorage.setItem(name, typeof value === "string" ? value : JSON.stringify(value));
  } catch { /* private windows may refuse; then only this page remembers */ }
}

function recall(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

const mine = (kind, rest = "") => `operant ${kind} ${token.slice(0, 8)} ${rest}`;
const draftName = () => mine("draft", `${labeller} ${state.item.number}`);
const pause = (ms) => new Promise((done) => setTimeout(done, ms));

function say(text, ms = 2500) {
  clearTimeout(noticeTimer);
  $("notice").textContent = text;
  $("notice").classList.toggle("on", Boolean(text));
  noticeTimer = setTimeout(() => $("notice").classList.remove("on"), ms);
}

function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

// --- the server ------------------------------------------------------------------------------------------------------

async function post(path, body) {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token}` };
  const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  if (answer.status >= 500) throw new Error((await answer.json().catch(() => ({}))).error || "the server has an error");
  return [answer.status, await answer.json()];
}

// Repeats until there is an answer: a server that was stopped and started again gets everything. Null: the server will
// never take it; undefined: not with this token.
async function insist(path, body, kept) {
  for (;;) {
    try {
      const [status, answer] = await post(path, body);
      trouble("");
      if (status === 200) return answer;
      trouble(answer.error);
      return status === 401 || status === 403 ? undefined : null;
    } catch (error) {
      const why = error instanceof TypeError ? "The server does not answer." : `${error.message}.`;
      trouble(`${why} ${kept ? "Your label is kept here and will be sent again" : "Trying again"}…`);
      await pause(RETRY_MS);
    }
  }
}

async function refresh() {
  clearTimeout(poll);
  await sendKept();
  const answer = await insist("next", { labeller });
  if (answer) show(answer);
}

async function sendKept() {
  const names = [];
  try { for (let i = 0; i < localStorage.length; i++) names.push(localStorage.key(i)); } catch { return; }
  for (const name of names.filter((name) => name.startsWith(mine("unsent")))) {
    const body = JSON.parse(recall(name) || "null");
    if (body && (await insist("label", body, true)) === undefined) continue;
    remember(name, null);
  }
}

async function send(answer, words) {
  if (busy || !state || !state.item) return;
  busy = true;
  const key = Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const comment = $("comment").value.trim();
  if (answer && comment) answer.comment = comment;
  const body = { labeller, item: state.item.number, answer, seconds: looked(), key };
  const name = mine("unsent", key), old = draftName();
  remember(name, body);
  const next = await insist("label", body, true);
  busy = false;
  if (next !== undefined) remember(name, null);
  if (!next) return;
  remember(old, null);
  show(next);
  say(next.notice || words);
}

async function undo() {
  if (busy || !state || state.undo === null) return;
  busy = true;
  clearTimeout(poll);
  const next = await insist("undo", { labeller, label: state.undo });
  busy = false;
  if (next) show(next);
  if (next) say(next.notice || "Taken back: choose again");
}

// --- time ------------------------------------------------------------------------------------------------------------

function looked() {
  const now = performance.now();
  return Math.round((watch.seconds + (document.hidden ? 0 : (now - watch.since) / 1000)) * 10) / 10;
}

document.addEventListener("visibilitychange", () => {
  const now = performance.now();
  if (document.hidden) watch.seconds += (now - watch.since) / 1000;
  watch.since = now;
});

function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  if (seconds < 45) return "less than a minute left";
  if (minutes < 60) return `about ${Math.max(minutes, 1)} minute${minutes > 1 ? "s" : ""} left`;
  const hours = Math.round(minutes / 6) / 10;
  return `about ${hours} hours left`;
}

// --- showing an item -------------------------------------------------------------------------------------------------

function show(next) {
  clearTimeout(poll);
  state = next;
  for (const [id, on] of [["welcome", false], ["rest", !state.item], ["work", state.item], ["actions", true]]) $(id).hidden = !on;
  $("who").hidden = false;
  $("who").textContent = labeller;
  $("count").textContent = `${state.done} of ${state.total}`
    + (state.seconds_left && state.done < state.total ? ` · ${duration(state.seconds_left)}` : "");
  $("fill").style.width = `${state.total ? (100 * state.done) / state.total : 0}%`;
  $("bar").setAttribute("aria-valuenow", state.done);
  $("bar").setAttribute("aria-valuemax", state.total);
  $("undo").disabled = state.undo === null;
  document.title = state.item ? `${state.done} of ${state.total} · ${QUESTIONS[state.kind]}` : "No more replies";
  if (!state.item) return rest();
  document.body.className = state.kind;
  $("question").textContent = QUESTIONS[state.kind];
  $("prompt").replaceChildren(...texts(state.item.prompt, "(no prompt)"));
  draft = begun();
  $("comment").value = draft.comment;
  openComment(Boolean(draft.comment), false);
  $("tie").hidden = state.kind !== "pick" && state.kind !== "rank";
  $("submit").hidden = state.kind === "pick";
  watch = { seconds: 0, since: performance.now() };
  focus = state.kind === "rank" ? -1 : 0;
  $("replies").classList.toggle("four", state.item.replies.length === 4);
  draw();
  scrollTo(0, 0);
  clip();
}

function rest() {
  const all = state.total > 0 && state.done >= state.total;
  $("rest-title").textContent = all ? "Thank you, that was the last one" : "No more replies right now";
  $("rest-text").textContent = "You can close this page; everything is stored. New replies appear here by themselves.";
  for (const id of ["skip", "all-bad", "tie", "remark", "submit"]) $(id).disabled = true;
  poll = setTimeout(refresh, POLL_MS);
}

function texts(messages, empty) {
  const body = make("div");
  for (const { role, text } of messages) {
    if (role) body.append(make("div", "role", role));
    body.append(text.trim() ? make("div", "text", text)
      : make("div", "text empty", messages.length > 1 ? "" : text ? "(only white space)" : empty));
  }
  if (!messages.length) body.append(make("div", "text empty", empty));
  return [body];
}

// What was done with this item before: an answer that was taken back, or a page that was closed in the middle.
function begun() {
  const count = state.item.replies.length, old = state.item.answer || {};
  const fresh = { ranking: [], tied: [], marks: Array(count).fill(null), comment: old.comment || "", best: old.best ?? null };
  if (old.ratings || old.good) fresh.marks = [...(old.ratings || old.good)];
  if (old.ranks && state.kind === "rank") {
    fresh.ranking = old.ranks.map((rank, i) => i).filter((i) => old.ranks[i] !== null).sort((a, b) => old.ranks[a] - old.ranks[b]);
    fresh.tied = fresh.ranking.filter((reply, at) => at && old.ranks[fresh.ranking[at - 1]] === old.ranks[reply]);
  }
  const kept = JSON.parse(recall(draftName()) || "null");
  return kept && kept.marks.length === count ? { ...fresh, ...kept } : fresh;
}

function changed() {
  draft.comment = $("comment").value;
  remember(draftName(), draft);
  draw();
}

function draw() {
  const ranking = state.kind === "rank", count = state.item.replies.length;
  const left = [...Array(count).keys()].filter((i) => !draft.ranking.includes(i));
  const cards = new Map([...document.querySelectorAll(".card")].filter((c) => c.item === state.item).map((c) => [c.index, c]));
  const of = (index) => {
    const card = cards.get(index) || build(index);
    dress(card);
    return card;
  };
  $("ranked").hidden = !ranking;
  const held = document.activeElement && document.activeElement.closest(".card");
  arrange($("ranked"), draft.ranking.map(of));
  arrange($("replies"), left.map(of));
  if (held && held.isConnected && !held.contains(document.activeElement)) look();
  $("divider").hidden = !ranking || !left.length;
  $("divider").textContent = draft.ranking.length ? `Not ranked yet: ${left.length}` : "The replies, in random order:";
  for (const id of ["skip", "all-bad", "remark"]) $(id).disabled = false;
  const at = draft.ranking.indexOf(focus);
  $("tie").disabled = ranking && at < 1;
  $("tie").firstChild.textContent = ranking ? "Tie" : "Equal";
  $("submit").disabled = ranking ? draft.ranking.length < 2 : draft.marks.every((mark) => mark === null);
  const open = ranking ? left.length : draft.marks.filter((mark) => mark === null).length;
  $("left-out").textContent = open && !$("submit").disabled ? `, ${open} left out` : "";
}

// Moves nothing that is in its place already: a card that is moved loses the keyboard.
function arrange(parent, cards) {
  if (cards.length !== parent.children.length || cards.some((card, i) => card !== parent.children[i])) parent.replaceChildren(...cards);
}

function build(index) {
  const card = make("article", "card"), head = make("div", "head"), body = make("div", "body");
  Object.assign(card, { index, item: state.item, tabIndex: 0 });
  card.setAttribute("aria-label", `Reply ${index + 1}`);
  if (state.kind === "rank") head.append(button("handle", "⠿", () => {}, `Drag reply ${index + 1}`));
  head.append(make("span", "number", index + 1));
  body.append(...texts(state.item.replies[index], "(empty reply)"));
  card.append(head, body);
  if (state.kind === "pick") {
    const choose = button("choose", "This one is best ", () => pick(index));
    choose.append(make("kbd", "", index + 1));
    card.append(choose);
  } else if (state.kind === "rank") head.append(make("span", "place"), make("span", "space"), tools(index));
  else head.append(make("span", "space"), marks(index));
  card.addEventListener("focus", () => move(index));
  card.addEventListener("click", () => move(index));
  return card;
}

function tools(index) {
  const made = make("div", "tools");
  made.append(
    button("next-best", "Next best", () => place(index)),
    button("tie", "=", () => tie(index), "Tie with the one above"),
    button("up", "↑", () => shift(index, -1), "Move up"),
    button("down", "↓", () => shift(index, 1), "Move down"),
    button("out", "✕", () => place(index), "Take out of the order"),
  );
  return made;
}

function marks(index) {
  const made = make("div", "marks");
  if (state.kind === "good") {
    made.append(button("yes", "Good", () => mark(index, true)), button("no", "Bad", () => mark(index, false)));
  } else {
    for (let value = 1; value <= state.scale; value++) {
      made.append(button("", String(value), () => mark(index, value), `${value} of ${state.scale}`));
    }
  }
  return made;
}

// Brings a card in line with the draft.
function dress(card) {
  const { index } = card, at = draft.ranking.indexOf(index), value = draft.marks[index];
  card.classList.toggle("focused", index === focus);
  card.classList.toggle("chosen", draft.best === index);
  card.classList.toggle("good", value === true);
  card.classList.toggle("bad", value === false);
  if (state.kind === "rank") {
    const rank = ranks()[index];
    card.querySelector(".place").hidden = at < 0;
    card.querySelector(".place").textContent = rank ? PLACES[rank - 1] : "";
    card.querySelector(".tie").setAttribute("aria-pressed", draft.tied.includes(index));
    for (const [kind, on] of [["next-best", at < 0], ["tie", at > 0], ["up", at >= 0], ["down", at >= 0], ["out", at >= 0]]) {
      card.querySelector(`.${kind}`).hidden = !on;
    }
  }
  for (const [i, one] of card.querySelectorAll(".marks button").entries()) {
    one.setAttribute("aria-pressed", value === (state.kind === "good" ? i === 0 : i + 1));
  }
}

// Long texts are cut with a button, so that all replies can be seen at once.
function clip() {
  for (const body of document.querySelectorAll("#prompt > div, .card .body > div")) {
    if (body.textContent.length < MANY_CHARACTERS && body.scrollHeight < innerHeight) continue;
    body.classList.add("long");
    const more = button("more", "Show all", () => { body.classList.remove("long"); more.remove(); });
    body.after(more);
  }
}

// --- what a labeller does --------------------------------------------------------------------------------------------

function pick(index) {
  draft.best = index;
  draw();
  send({ best: index }, `Reply ${index + 1} is best`);
}

function ranks() {
  let rank = 0;
  const found = Array(state.item.replies.length).fill(null);
  draft.ranking.forEach((reply, at) => {
    if (!at || !draft.tied.includes(reply)) rank += 1;
    found[reply] = rank;
  });
  return found;
}

/** A tie stays between neighbours that were equal before; `alone` is tied no more. */
function reorder(order, alone) {
  const before = ranks();
  draft.tied = draft.tied.filter((reply) => reply !== alone && before[order[order.indexOf(reply) - 1]] === before[reply]);
  draft.ranking = order;
  changed();
}

function place(index) {
  focus = index;
  const others = draft.ranking.filter((reply) => reply !== index);
  reorder(draft.ranking.includes(index) ? others : [...draft.ranking, index], index);
}

function shift(index, by) {
  if (index < 0) return;
  const at = draft.ranking.indexOf(index), to = at + by;
  focus = index;
  if (at < 0) return place(index);
  if (to < 0 || to >= draft.ranking.length) return;
  reorder(draft.ranking.toSpliced(at, 1).toSpliced(to, 0, index), index);
  look();
}

function tie(index) {
  focus = index;
  if (draft.ranking.indexOf(index) < 1) return;
  draft.tied = draft.tied.includes(index) ? draft.tied.filter((reply) => reply !== index) : [...draft.tied, index];
  changed();
}

function mark(index, value, onwards) {
  focus = index;
  draft.marks[index] = draft.marks[index] === value && !onwards ? null : value;
  if (onwards) {
    const count = draft.marks.length, order = [...Array(count).keys()].map((i) => (index + 1 + i) % count);
    focus = order.find((i) => draft.marks[i] === null) ?? index;
  }
  changed();
  look();
}

function submit() {
  if ($("submit").hidden || $("submit").disabled) return;
  const field = { rank: "ranks", rate: "ratings", good: "good" }[state.kind];
  send({ [field]: state.kind === "rank" ? ranks() : draft.marks }, "Stored");
}

function allBad() {
  const marks = state.kind === "good" ? { good: draft.marks.map(() => false) } : {};
  send({ ...marks, all_bad: true }, "All are bad");
}

function equal() {
  if (state.kind === "pick") send({ ranks: state.item.replies.map(() => 1) }, "All are equally good");
  else if (state.kind === "rank") tie(focus);
}

function openComment(open, enter = true) {
  $("comment-box").hidden = !open;
  $("remark").setAttribute("aria-expanded", open);
  if (open && enter) $("comment").focus();
}

// Makes a reply the one that keys mean; `look` also scrolls to it.
function move(index) {
  focus = index;
  draw();
}

function look() {
  const card = [...document.querySelectorAll(".card")].find((one) => one.index === focus);
  if (!card) return;
  if (document.activeElement !== card) card.focus({ preventScroll: true });
  card.scrollIntoView({ block: "nearest" });
}

function step(by) {
  const order = [...document.querySelectorAll(".card")].map((card) => card.index);
  move(order[Math.min(Math.max(order.indexOf(focus) + by, 0), order.length - 1)]);
  look();
}

function digit(number) {
  const count = state.item.replies.length;
  if (state.kind === "rate") {
    if (number <= state.scale) mark(focus, number, true);
  } else if (number <= count) {
    const index = number - 1, value = draft.marks[index];
    if (state.kind === "pick") pick(index);
    else if (state.kind === "rank") place(index);
    else mark(index, value === null ? true : value ? false : null, false);
  }
}

const skip = () => send(null, "Skipped");
const KEYS = {
  s: skip, ".": skip, 0: allBad, x: allBad, t: equal, "+": equal, c: () => openComment(true), enter: submit, e: submit,
  arrowup: () => step(-1), arrowdown: () => step(1),
  g: () => state.kind === "good" && mark(focus, true, true), b: () => state.kind === "good" && mark(focus, false, true),
};

document.addEventListener("keydown", (event) => {
  const key = event.key.toLowerCase();
  if ($("help").open || $("actions").hidden) return;
  if (event.target === $("comment")) {
    if (key === "escape") $("comment").blur();
    if (key === "enter" && (event.ctrlKey || event.metaKey)) submit();
    return;
  }
  if (key === "z" && (event.ctrlKey || event.metaKey)) event.preventDefault();
  else if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.repeat && !key.startsWith("arrow")) return;
  if (key === "?") help();
  else if (["u", "z", "backspace", "-"].includes(key)) undo();
  else if (!state || !state.item || busy) return;
  else if (/^[1-9]$/.test(key)) digit(Number(key));
  else if (event.shiftKey && key.startsWith("arrow") && state.kind === "rank") shift(focus, key === "arrowup" ? -1 : 1);
  else if (key === "enter" && event.target.tagName === "BUTTON") return;
  else if (key === "enter" && state.kind === "pick" && event.target.classList.contains("card")) pick(event.target.index);
  else if (KEYS[key]) KEYS[key]();
  else return;
  event.preventDefault();
});

// --- help, name, beginning -------------------------------------------------------------------------------------------

const HELP = {
  pick: [["1 – 9", "this reply is best"], ["T", "all are equally good"]],
  rank: [["1 – 9", "this reply is the next best; again: take it out"], ["Shift ↑ ↓", "move a reply up or down"],
    ["T", "the reply is as good as the one above it"], ["Enter, E", "done"]],
  rate: [["1 – 5", "rate the marked reply, 5 is best, and go to the next"], ["Enter, E", "done"]],
  good: [["G, B", "the marked reply is good, is bad; then the next"], ["1 – 9", "this reply is good; again: bad; again: neither"],
    ["Enter, E", "done"]],
};
const HELP_OF_ALL = [["↑ ↓", "mark another reply"], ["0, X", "all replies are bad"], ["S", "skip"], ["U, Z", "take the last one back"],
  ["C", "write a comment; Escape leaves it"], ["?", "this help"]];

function help() {
  $("keys").replaceChildren(...[...HELP[state ? state.kind : "pick"], ...HELP_OF_ALL].map(([keys, text]) => {
    const row = make("tr"), cell = make("td");
    for (const key of keys.split(", ")) cell.append(make("kbd", "", key), " ");
    row.append(cell, make("td", "", text));
    return row;
  }));
  $("help").showModal();
}

function welcome() {
  clearTimeout(poll);
  for (const id of ["rest", "work", "actions", "who"]) $(id).hidden = true;
  $("welcome").hidden = false;
  $("name").value = labeller;
  $("name").focus();
}

$("welcome").addEventListener("submit", (event) => {
  event.preventDefault();
  labeller = $("name").value.split(/\s+/).filter(Boolean).join(" ");
  if (!labeller) return;
  remember(mine("name"), labeller);
  $("name").blur();
  refresh();
});
$("ask").addEventListener("click", help);
$("who").addEventListener("click", () => { if (!busy) welcome(); });
$("undo").addEventListener("click", undo);
$("skip").addEventListener("click", skip);
$("all-bad").addEventListener("click", allBad);
$("tie").addEventListener("click", equal);
$("remark").addEventListener("click", () => openComment($("comment-box").hidden));
$("submit").addEventListener("click", submit);
$("comment").addEventListener("input", () => { draft.comment = $("comment").value; remember(draftName(), draft); });

function dropped() {
  reorder([...$("ranked").children].map((card) => card.index));
}

for (const id of ["ranked", "replies"]) {
  Sortable.create($(id), { group: "replies", handle: ".handle", animation: 150, forceFallback: true, fallbackTolerance: 3,
    ghostClass: "ghost", dragClass: "dragged", onEnd: dropped });
}

function begin() {
  token = decodeURIComponent(location.hash.slice(1));
  if (!token) return trouble("The address lacks its token: open the whole address that the terminal shows.");
  trouble("");
  labeller = recall(mine("name")) || "";
  if (labeller) refresh();
  else welcome();
}

addEventListener("hashchange", begin);
begin();
