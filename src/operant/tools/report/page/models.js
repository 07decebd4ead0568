// Lays out the replies of several models to the same tasks, from the data of models.py. Texts are set as text, never as HTML.
(() => {
  const data = JSON.parse(document.querySelector("#data").textContent);
  const main = document.querySelector("#page");
  const { models, rewards, tasks } = data;
  const SHOWN = 5; // tasks on the page at a time

  const { make } = Charts.parts;

  /** One row for each reward, or number such as pass@8, and model; each is named once. */
  function table() {
    const names = Object.keys(data.table[0]).filter((name) => name !== "reward");
    const row = (cells) => make("tr", {}, make("th", {}, cells.model), ...names.slice(1).map((name) => make("td", { class: "n", "data-label": name, ...(cells[name] ? {} : { class: "n absent" }) }, cells[name])));
    return [...new Set(data.table.map((cells) => cells.reward))].map((reward) => make("div", { class: "scroll" }, make("h3", {}, reward), make("table", { class: "down" },
      make("thead", {}, make("tr", {}, ...names.map((name) => make("th", {}, name)))),
      make("tbody", {}, ...data.table.filter((cells) => cells.reward === reward).map(row)))));
  }

  // --- the replies ----------------------------------------------------------------------------------------------------

  const chosen = { first: 0, order: tasks.map((_, i) => i), by: "" };
  const known = (values) => values.filter((value) => value !== null);
  function mean(task, side, reward) {
    const scores = known(tasks[task].sides[side].map(([, values]) => values[reward]));
    return scores.length ? scores.reduce((sum, value) => sum + value, 0) / scores.length : null;
  }

  /** Where the last model differs most from the first by a reward, best or worst first; tasks without scores come last. */
  function sorted(reward, sign) {
    const gap = (task) => {
      const [first, last] = [mean(task, 0, reward), mean(task, models.length - 1, reward)];
      return first === null || last === null ? -Infinity : sign * (last - first);
    };
    return tasks.map((_, i) => i).map((i) => [gap(i), i]).sort(([a, i], [b, k]) => (a === b ? i - k : b > a ? 1 : -1)).map(([, i]) => i);
  }

  function answer(name, [text, scores]) {
    const content = text.trim() ? make("span", { class: "text" }, text) : make("span", { class: "none" }, "(empty)");
    const written = scores.map((score) => (score === null ? "–" : Charts.number(score))).join(" · ");
    return make("div", { class: "answer" }, make("span", {}, name), content, make("span", { class: "n", title: rewards.join(" · ") }, written));
  }

  function replies(host) {
    const last = Math.max(0, Math.ceil(tasks.length / SHOWN) - 1) * SHOWN;
    const go = (first) => { chosen.first = Math.max(0, Math.min(first, last)); replies(host); };
    const end = Math.min(chosen.first + SHOWN, tasks.length);
    const order = (name, makeOrder) => make("button", { type: "button", class: "order", "aria-pressed": String(chosen.by === name), title: name ? `${models.at(-1)} against ${models[0]}` : "",
      onclick: () => { Object.assign(chosen, { by: name, order: makeOrder(), first: 0 }); replies(host); } }, name || "in order");
    const orders = models.length < 2 ? [] : [order("", () => tasks.map((_, i) => i)), ...rewards.flatMap((reward, i) => [
      order(`${reward}: gains first`, () => sorted(i, 1)), order(`${reward}: losses first`, () => sorted(i, -1))])];
    const choose = make("div", { class: "choose" },
      make("button", { type: "button", id: "earlier", onclick: () => go(chosen.first - SHOWN), ...(chosen.first ? {} : { disabled: "" }) }, "‹ earlier"),
      make("span", {}, `tasks ${chosen.first + 1} to ${end} of ${tasks.length}`),
      make("button", { type: "button", id: "later", onclick: () => go(chosen.first + SHOWN), ...(end < tasks.length ? {} : { disabled: "" }) }, "later ›"), ...orders);
    const blocks = chosen.order.slice(chosen.first, end).map((i) => make("div", { class: "query-block" },
      make("p", { class: "text" }, tasks[i].prompt),
      ...tasks[i].sides.flatMap((side, place) => side.map((reply) => answer(models[place], reply)))));
    host.replaceChildren(choose, ...blocks);
  }

  const host = make("div");
  main.replaceChildren(
    make("nav", {}, make("a", { class: "run", href: "#page" }, document.title), make("a", { href: "#scores" }, "Scores"), make("a", { href: "#replies" }, "Replies")),
    make("p", { class: "status" }, data.about),
    make("section", { id: "scores" }, make("h2", {}, "Scores"),
      make("p", { class: "soft" }, models.length > 1
        ? `Differences and win rates are to ${models[0]}, task by task. Difference: 95 % interval over the tasks, which are paired: Student's t of fewer than 30, else the bootstrap. Win rate: ties count half, 95 % interval of Wilson.`
        : "Means over the tasks."), ...table()),
    make("section", { id: "replies" }, make("h2", {}, "Replies"),
      make("p", { class: "soft" }, `The same tasks, answered by every model; at the right the score by ${rewards.join(" · ")}.${
        tasks.length < data.all ? ` The first ${tasks.length} of ${data.all} tasks; --out has all.` : ""}`), host));
  replies(host);
})();
