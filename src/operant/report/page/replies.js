// The replies of a run: the fixed queries side by side, a table of all the others, and the tokens of any. No global but
// `Replies`.
//
//   Replies.mount(element, data, live)    data: what replies.py embeds; live: {base: ""}, then serve.py is asked instead
//
// Texts from a run are set as text, never as HTML. Colours are shares of CSS variables, so a change of theme needs nothing.
const Replies = (() => {
  const PAGE = 25; // rows at a time
  const EVERY = 4000; // milliseconds between two questions of the live page
  const COLUMNS = { step: "Step", reward: "Reward", kl: "KL", reply_tokens: "Tokens", end: "End" };
  const ENDS = { stop: "stopped", length: "length limit", world: "ended by the world", cut: "cut" };

  function make(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      key.startsWith("on") ? made.addEventListener(key.slice(2), value) : made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
    return made;
  }

  const known = (value) => value !== null && value !== undefined;
  const fixed = (value, digits = 3) => (known(value) ? value.toFixed(Math.abs(value) >= 1000 ? 0 : digits).replace("-", "−") : "–");
  const signed = (value, digits = 3) => (value > 0 ? "+" : "") + fixed(value, digits);
  /** How many decimals these numbers need, all of them alike. */
  function decimals(values) {
    const most = Math.max(0, ...values.filter(known).map(Math.abs));
    return values.filter(known).every(Number.isInteger) ? 0 : most < 10 ? 3 : most < 100 ? 2 : 1;
  }
  const count = (value) => value.toLocaleString("en");
  const some = (value, one, more) => `${count(value)} ${value === 1 ? one : more}`;
  const average = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

  /** What stands in backticks is code. */
  const sentence = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));

  /** `text` with what was searched for marked. */
  function marked(text, search) {
    const parts = [], low = text.toLowerCase(), wanted = search.toLowerCase();
    let at = 0;
    // Where lower case has another length, places in it are no places in the text.
    for (let next; wanted && low.length === text.length && (next = low.indexOf(wanted, at)) >= 0; at = next + wanted.length) {
      parts.push(text.slice(at, next), make("mark", {}, text.slice(next, next + wanted.length)));
    }
    return [...parts, text.slice(at)];
  }

  // --- where replies come from ---------------------------------------------------------------------------------------

  /** From the page itself. `find` answers as serve.py does. */
  function embedded(data) {
    const { rows: columns, of_tokens: chunks } = data.replies;
    const names = Object.keys(columns);
    const rows = columns.step.map((_, i) => Object.fromEntries([["place", i], ...names.map((name) => [name, columns[name][i]])]));
    for (const row of rows) row.text = `${row.query}\n${row.reply}`.toLowerCase();
    const steps = [...new Set(columns.step)];
    return {
      says: data.says,
      probes: async () => data,
      probeTokens: async (side, step, i) => cells(side.of_tokens, i),
      async tokens({ place }) {
        const chunk = chunks.findLast(({ first }) => first <= place);
        return chunk ? cells(chunk, place - chunk.first) : null;
      },
      async find({ search, sort, descending, step, offset, limit }) {
        const wanted = search.toLowerCase();
        const found = rows.filter((row) => (step === null || row.step === step) && row.text.includes(wanted)).sort(order(sort, descending));
        return { total: found.length, rows: found.slice(offset, offset + limit), steps, exist: data.exist, notes: data.notes };
      },
    };
  }

  const cells = (columns, i) => columns && known(columns.tokens?.[i]) ? Object.fromEntries(SEEN.map((name) => [name, columns[name]?.[i] ?? null])) : null;

  /** By the column, what is unknown last; then the newest step, then as they came. */
  function order(sort, descending) {
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    return (a, b) => {
      const [x, y] = [a[sort], b[sort]];
      if (known(x) !== known(y)) return known(x) ? -1 : 1;
      return (descending ? compare(y, x) : compare(x, y)) || b.step - a.step || a.row - b.row;
    };
  }

  /** From the server, which reads every reply of the run folder. */
  function served({ base }) {
    async function ask(path, parameters = {}) {
      const given = Object.entries(parameters).filter(([, value]) => known(value) && value !== "");
      const query = new URLSearchParams(given.map(([name, value]) => [name, typeof value === "boolean" ? Number(value) : value]));
      const answer = await fetch(`${base}${path}?${query}`, { cache: "no-store" });
      const told = await answer.json();
      if (!answer.ok) throw new Error(told.error);
      return told;
    }
    const tokens = async (of, step, row) => {
      const told = await ask("tokens.json", { of, step, row });
      return known(told.tokens) ? told : null;
    };
    return {
      live: true,
      probes: () => ask("probes.json"),
      probeTokens: (side, step, i) => tokens(step === null ? "reference" : "probes", step ?? 0, side.row[i]),
      tokens: ({ step, row }) => tokens("rollouts", step, row),
      find: (state) => ask("replies.json", state),
    };
  }

  // --- tokens --------------------------------------------------------------------------------------------------------

  const SEEN = ["tokens", "logprobs", "ref_logprobs", "values", "advantages"];
  const FLOOR = 8; // nats: what is less likely than exp(-8) is as dark as can be
  const ways = {
    logprobs: { label: "Policy log-prob", of: (t, i) => t.logprobs?.[i], scale: likely("--blue"), says: "the darker, the less likely under the policy" },
    ref_logprobs: { label: "Reference log-prob", of: (t, i) => t.ref_logprobs?.[i], scale: likely("--orange"), says: "the darker, the less likely under the reference" },
    kl: { label: "KL", of: difference, scale: around("--blue", "--orange", 1), says: "log-prob minus reference: blue where the policy likes the token more, orange where the reference does" },
    values: { label: "Value", of: (t, i) => t.values?.[i], scale: between("--green"), says: "what the critic expected before the token" },
    advantages: { label: "Advantage", of: (t, i) => t.advantages?.[i], scale: around("--green", "--pink", 0.1), says: "green: better than expected, made likelier; pink: worse" },
  };
  let way = "kl"; // the choice stays when another reply is opened
  let groups = 0; // of radio buttons, each with a name of its own

  function difference(tokens, i) {
    const [own, other] = [tokens.logprobs?.[i], tokens.ref_logprobs?.[i]];
    return known(own) && known(other) ? own - other : null;
  }

  // A scale makes, of all the values shown: colour(value) -> [variable, share of it], and a legend [[share, variable, text], ...].
  function likely(name) {
    return () => ({ colour: (v) => [name, Math.min(1, -v / FLOOR)], legend: [[name, 0, "0: certain"], [name, 1, `−${FLOOR} and below`]] });
  }

  function around(above, below, least) {
    return (values) => {
      const most = Math.max(least, ...values.map(Math.abs));
      const colour = (v) => [v < 0 ? below : above, Math.abs(v) / most];
      return { colour, legend: [[below, 1, fixed(-most, 2)], [above, 0, "0"], [above, 1, signed(most, 2)]] };
    };
  }

  function between(name) {
    return (values) => {
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const colour = (v) => [name, high > low ? (v - low) / (high - low) : 0];
      return { colour, legend: high > low ? [[name, 0, fixed(low, 2)], [name, 1, fixed(high, 2)]] : [[name, 0, fixed(low, 2)]] };
    };
  }

  /** Replies opened: [{title, facts, query, reply, tokens}], side by side where there are two. */
  function opened(sides, missing) {
    const tip = make("div", { class: "tip", role: "tooltip", hidden: true });
    const legend = make("p", { class: "legend" });
    const bodies = sides.map((side) => (side.tokens ? tokenList(side, tip) : make("p", { class: "said" }, make("i", {}, side.query), side.reply)));
    const has = (name) => sides.some(({ tokens }) => tokens?.tokens.some((_, i) => known(ways[name].of(tokens, i))));
    const names = Object.keys(ways).filter(has);
    if (!names.includes(way) && names.length) way = names[0];
    const group = `way-${++groups}`;
    const radios = names.map((name) => make("label", {},
      make("input", { type: "radio", name: group, value: name, checked: name === way, onchange: () => ((way = name), paint()) }), ways[name].label));

    function paint() {
      const { of, scale, says } = ways[way];
      const values = sides.flatMap(({ tokens }) => (tokens ? tokens.tokens.map((_, i) => of(tokens, i)) : [])).filter(known);
      const made = scale(values);
      legend.replaceChildren(make("span", { class: "bar", style: gradient(made.legend) }), ...made.legend.map(([, , text]) => make("b", {}, text)), make("span", {}, says));
      sides.forEach(({ tokens }, s) => tokens && bodies[s].querySelectorAll(".token").forEach((span, i) => {
        const value = of(tokens, i);
        const [name, share] = known(value) ? made.colour(value) : ["--paper", 0];
        span.style.setProperty("--hue", `var(${name})`);
        span.style.setProperty("--share", share.toFixed(3));
        span.setAttribute("aria-label", `${span.textContent.trim() || "space"}, ${ways[way].label} ${fixed(value)}`);
      }));
    }
    if (names.length) paint();
    return make("div", { class: "opened" },
      names.length ? make("fieldset", { class: "ways" }, make("legend", {}, "Colour by"), radios) : make("p", { class: "missing" }, sentence(missing)),
      names.length ? legend : null,
      make("div", { class: "sides" }, sides.map((side, s) => make("div", { class: `side ${side.class ?? ""}` },
        make("p", { class: "facts-line" }, side.title ? make("b", {}, `${side.title} `) : null, side.facts.filter(known).join(" · ")), bodies[s]))),
      tip);
  }

  const mixed = (name, share) => `color-mix(in srgb, var(${name}) calc(${share} * var(--strength)), transparent)`;
  const gradient = (legend) => `background-image: linear-gradient(to right, ${(legend.length > 1 ? legend : [...legend, ...legend]).map(([name, share]) => mixed(name, share)).join(", ")})`;

  /** The tokens of a reply: a list to walk with the arrow keys; each tells its numbers when it is pointed at. */
  function tokenList({ query, tokens }, tip) {
    // The space before a word stands outside of it: a line may break there, and the colours end where the words do.
    const cut = tokens.tokens.map((piece) => [/^ *(?=[^ ])/.exec(piece)?.[0] ?? "", piece]);
    const spans = cut.map(([space, piece], i) => make("span", { class: "token", role: "option", tabindex: i ? -1 : 0, "data-i": i },
      piece === "" ? "∅" : piece.slice(space.length).replaceAll("\n", "⏎\n")));
    const list = make("span", { role: "listbox", "aria-label": "Tokens of the reply; arrow keys walk through them", "aria-orientation": "horizontal" },
      spans.map((span, i) => [cut[i][0], span]));
    const host = make("p", { class: "said" }, make("i", {}, query), list);
    const at = (event) => event.target.closest(".token");
    const show = (event) => at(event) && pointed(at(event), tokens, tip);
    list.addEventListener("pointerover", show);
    list.addEventListener("focusin", show);
    list.addEventListener("pointerleave", () => (tip.hidden = true));
    list.addEventListener("focusout", () => (tip.hidden = true));
    list.addEventListener("keydown", (event) => {
      const next = step(spans, spans.indexOf(at(event)), event.key);
      if (!next) return;
      event.preventDefault();
      for (const span of spans) span.tabIndex = span === next ? 0 : -1;
      next.focus();
    });
    return host;
  }

  /** The token that a key leads to from the i-th. */
  function step(spans, i, key) {
    const [here, middle] = [spans[i], (span) => span.offsetLeft + span.offsetWidth / 2];
    const line = (found) => found.reduce((best, span) => (!best || (span.offsetTop === best.offsetTop && Math.abs(middle(span) - middle(here)) < Math.abs(middle(best) - middle(here))) ? span : best), null);
    if (key === "ArrowDown") return line(spans.filter((span) => span.offsetTop > here.offsetTop));
    if (key === "ArrowUp") return line(spans.filter((span) => span.offsetTop < here.offsetTop).reverse());
    return { ArrowRight: spans[i + 1], ArrowLeft: spans[i - 1], Home: spans[0], End: spans.at(-1) }[key];
  }

  function pointed(span, tokens, tip) {
    const i = Number(span.dataset.i);
    const lines = Object.entries(ways).map(([name, { label, of }]) => [name, label, of(tokens, i)]).filter(([, , value]) => known(value));
    tip.replaceChildren(make("code", {}, JSON.stringify(tokens.tokens[i])), make("dl", {}, lines.map(([name, label, value]) =>
      [make("dt", { class: name === way ? "on" : "" }, label), make("dd", { class: name === way ? "on" : "" }, fixed(value))])));
    tip.hidden = false;
    const panel = tip.parentElement.getBoundingClientRect(), box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.min(Math.max(0, box.left - panel.left), panel.width - tip.offsetWidth);
    const below = box.bottom + tip.offsetHeight + 12 > innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${below ? box.top - panel.top - tip.offsetHeight - 6 : box.bottom - panel.top + 6}px`;
  }

  // --- tables --------------------------------------------------------------------------------------------------------

  /** A table whose heads sort. columns: [{name, label, class, sorts}]; state: {sort, descending}. */
  function table(caption, columns, state, changed) {
    const heads = columns.map(({ name, label, class: kind, sorts }) => make("th", { scope: "col", class: kind, "data-name": name, role: "columnheader" },
      sorts ? make("button", { type: "button", onclick: () => sortBy(name) }, label) : make("span", { class: name === "open" ? "hidden" : undefined }, label)));
    const body = make("tbody", { role: "rowgroup" });
    function sortBy(name) {
      state.descending = state.sort === name ? !state.descending : name !== "place" && name !== "end";
      state.sort = name;
      changed();
    }
    // Roles are said aloud: the layout of cards on a phone would take them from the table.
    const host = make("table", { class: "reply-table", role: "table" }, make("caption", { class: "hidden" }, caption),
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, heads)), body);
    return { host, body, heads, tell: () => heads.forEach((head) => head.querySelector("button") && head.setAttribute("aria-sort",
      head.dataset.name !== state.sort ? "none" : state.descending ? "descending" : "ascending")) };
  }

  /** A row that opens: a click anywhere on it, or its button. `content` gives what stands below, perhaps later. */
  function openable(cells, width, label, content) {
    const button = make("button", { type: "button", class: "open", "aria-expanded": "false", "aria-label": label });
    const row = make("tr", { class: "line", role: "row" }, cells, cell("opens", "", button));
    let below = null;
    async function toggle() {
      if (below) {
        below.remove();
        below = null;
      } else {
        const host = make("td", { colspan: width, role: "cell" }, "…");
        below = make("tr", { class: "below", role: "row" }, host);
        row.after(below);
        try {
          host.replaceChildren(await content());
        } catch (error) {
          host.replaceChildren(make("p", { class: "missing" }, error.message));
        }
      }
      button.setAttribute("aria-expanded", String(Boolean(below)));
      if (below) below.addEventListener("keydown", (event) => event.key === "Escape" && (toggle(), button.focus()));
    }
    row.addEventListener("click", () => getSelection().isCollapsed && toggle());
    return row;
  }

  const cell = (kind, label, ...children) => make("td", { class: kind, role: "cell", "data-label": label }, children);

  /** A slider over steps. `set(steps)` keeps the step that is shown, or follows the newest. */
  function slider(label, moved) {
    const input = make("input", { type: "range", min: 0, max: 0, value: 0, oninput: () => (tell(), moved(steps[input.value])) });
    const told = make("output", {});
    let steps = [];
    const tell = () => {
      told.textContent = steps.length ? `step ${count(steps[input.value])}` : "no step";
      input.setAttribute("aria-valuetext", told.textContent);
    };
    return {
      host: make("label", { class: "slider" }, make("span", {}, label), input, told),
      get step() { return steps[input.value] ?? null; },
      set(news) {
        const step = steps[input.value], newest = Number(input.value) >= steps.length - 1;
        steps = news;
        input.max = Math.max(0, steps.length - 1);
        input.value = newest || !steps.includes(step) ? input.max : steps.indexOf(step);
        input.disabled = steps.length < 2;
        tell();
      },
    };
  }

  const facts = (row) => [known(row.reward) ? `score ${fixed(row.reward, decimals([row.reward]))}` : "no score", known(row.kl) ? `KL ${fixed(row.kl, 2)} nats` : null,
    known(row.reply_tokens) ? `${row.reply_tokens} tokens` : null, ENDS[row.end] ?? row.end];

  // --- the fixed queries ---------------------------------------------------------------------------------------------

  function probeView(source) {
    const state = { sort: "place", descending: false };
    let told = null, written = "";
    const steps = slider("Step", draw);
    const summary = make("p", { class: "summary", role: "status" }), explained = make("p", { class: "explained" });
    const columns = [["place", "Query", "query"], ["before", "Reference", "reply"], ["after", "Policy", "reply policy"], ["gain", "Gain", "n"]]
      .map(([name, label, kind]) => ({ name, label, class: kind, sorts: true }));
    const list = table("Fixed queries", [...columns, { name: "open", label: "Tokens", class: "opens" }], state, draw);
    const host = make("div", { class: "probes" }, explained, make("div", { class: "controls" }, steps.host, summary), list.host);

    /** The side to compare with: the reference, else the policy before training. */
    function other() {
      if (told.reference) return { side: told.reference, title: "Reference", step: null };
      return { side: told.policy[0], title: `Policy, step ${told.steps[0]}`, step: told.steps[0] };
    }

    function draw() {
      const after = told.policy[told.steps.indexOf(steps.step)], { side: before, title } = other();
      const rows = told.queries.map(({ query }, place) => {
        const [x, y] = [before.reward[place], after.reward[place]];
        return { place, row: place, step: 0, query, before: x, after: y, gain: known(x) && known(y) ? y - x : null };
      });
      const digits = decimals(rows.flatMap((row) => [row.before, row.after]));
      list.heads[1].firstChild.textContent = title;
      list.heads[2].firstChild.textContent = `Policy, step ${steps.step}`;
      list.tell();
      explained.textContent = `The same ${some(told.queries.length, "query", "queries")}, answered every few steps by the policy`
        + (told.reference ? " and once by the reference, always with the same random numbers." : ", always with the same random numbers.");
      list.body.replaceChildren(...rows.sort(order(state.sort, state.descending)).map((row) => line(row, before, after, title, digits)));
      const gains = rows.map((row) => row.gain).filter(known), better = gains.filter((gain) => gain > 0).length;
      const mean = (name) => fixed(average(rows.map((row) => row[name]).filter(known)));
      summary.replaceChildren(`Mean score ${mean("before")} → `, make("b", {}, mean("after")), `; better on ${better} of ${gains.length} queries`);
    }

    function line(row, before, after, title, digits) {
      const said = (side) => [make("b", {}, fixed(side.reward[row.place], digits)), make("span", { class: "said" }, known(side.reply[row.place]) ? side.reply[row.place].trimStart() : "–")];
      const kind = row.gain > 0 ? "up" : row.gain < 0 ? "down" : "";
      return openable([cell("query", "", row.query), cell("reply", title, said(before)), cell("reply policy", "Policy", said(after)),
        cell(`n gain ${kind}`, "Gain", known(row.gain) ? signed(row.gain, digits) : "–")], 5, `Tokens of the answers to ${row.query}`, () => tokensOf(row, after));
    }

    async function tokensOf({ place, query }, after) {
      const { side: before, title, step } = other(), now = steps.step;
      const pair = [[before, title, step, ""], [after, `Policy, step ${now}`, now, "policy"]].filter(([side]) => known(side.reply[place]));
      return opened(await Promise.all(pair.map(async ([side, title, step, kind]) => ({
        title, class: kind, query, reply: side.reply[place], tokens: await source.probeTokens(side, step, place),
        facts: facts(Object.fromEntries(["reward", "kl", "reply_tokens", "end"].map((name) => [name, side[name][place]]))),
      }))), missing(source));
    }

    return { host, get any() { return Boolean(told); }, async refresh() {
      const { probes } = await source.probes(), text = source.live ? JSON.stringify(probes) : "";
      if (!probes || (told && text === written)) return;
      const open = list.body.querySelector(".below"), step = steps.step;
      [told, written] = [probes, text];
      steps.set(probes.steps);
      if (!open || steps.step !== step) draw(); // what somebody reads stays
    } };
  }

  const missing = (source) => (source.live ? "This run did not record what each token was." : "The numbers of these tokens are not on this page: "
    + "`operant report RUN --serve` shows them, where the run recorded them.");

  // --- the table of replies ------------------------------------------------------------------------------------------

  function replyView(source) {
    const state = { search: "", sort: "step", descending: true, step: null, offset: 0, limit: PAGE };
    let asked = 0, written = "", total = 0, waiting;
    const steps = slider("Step", (step) => change({ step }));
    const all = make("input", { type: "checkbox", checked: true, onchange: () => change({ step: all.checked ? null : steps.step }) });
    const search = make("input", { type: "search", placeholder: "Search queries and replies", "aria-label": "Search queries and replies", oninput: () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => change({ search: search.value }), source.live ? 200 : 60);
    } });
    const summary = make("p", { class: "summary", role: "status" }), notes = make("p", { class: "missing" });
    const columns = Object.entries(COLUMNS).map(([name, label]) => ({ name, label, class: name === "end" ? "end" : "n", sorts: true }));
    const list = table("Replies", [...columns, { name: "text", label: "Query and reply", class: "reply" }, { name: "open", label: "Tokens", class: "opens" }],
      state, () => change({}));
    const turn = (label, by) => make("button", { type: "button", onclick: () => change({ offset: state.offset + by * PAGE }) }, label);
    const [back, on, place] = [turn("Previous", -1), turn("Next", 1), make("span", {})];
    const host = make("div", { class: "replies" },
      make("div", { class: "controls" }, search, make("label", { class: "all-steps" }, all, "All steps"), steps.host, summary),
      list.host, make("div", { class: "pager" }, back, place, on), notes);

    function change(news) {
      Object.assign(state, "offset" in news ? news : { offset: 0, ...news });
      return refresh(true);
    }

    async function refresh(wanted) {
      const number = ++asked;
      host.setAttribute("aria-busy", "true");
      let found;
      try {
        found = await source.find(state);
      } catch (error) {
        if (wanted) summary.textContent = error.message; // else the server is gone: what is shown stays
        return;
      }
      if (number !== asked) return; // somebody was quicker
      host.removeAttribute("aria-busy");
      steps.set(found.steps);
      tell(found);
      const text = JSON.stringify(found.rows);
      if (!wanted && (text === written || list.body.querySelector(".below"))) return;
      written = text;
      const digits = decimals(found.rows.map((row) => row.reward));
      list.body.replaceChildren(...found.rows.map((row) => line(row, digits)));
    }

    function tell(found) {
      total = found.total;
      all.checked = state.step === null;
      steps.host.classList.toggle("off", all.checked);
      list.tell();
      const last = Math.min(state.offset + PAGE, total), { replies, steps: many } = found.exist;
      summary.replaceChildren(state.search || state.step !== null ? `${count(total)} found. ` : "",
        ...sentence(source.says ?? (replies ? `All ${some(replies, "reply", "replies")} of ${some(many, "step", "steps")} are here.` : "No replies yet.")));
      place.textContent = total ? `${count(state.offset + 1)}–${count(last)} of ${count(total)}` : "nothing found";
      back.disabled = !state.offset;
      on.disabled = last >= total;
      notes.textContent = found.notes.join(" ");
    }

    function line(row, digits) {
      return openable([
        cell("n", "Step", String(row.step)), cell("n reward", "Reward", fixed(row.reward, digits)), cell("n", "KL", fixed(row.kl, 2)),
        cell("n", "Tokens", known(row.reply_tokens) ? String(row.reply_tokens) : "–"), cell("end", "End", ENDS[row.end] ?? row.end ?? "–"),
        cell("reply", "", make("span", { class: "said" }, make("i", {}, marked(row.query ?? "", state.search)), marked(row.reply ?? "", state.search))),
      ], 7, `Tokens of the reply to ${row.query}`, async () => {
        const parts = Object.keys(row).filter((name) => name.startsWith("reward/")).map((name) => `${name.slice(7)} ${fixed(row[name])}`);
        const side = { title: `Step ${row.step}`, query: row.query, reply: row.reply, facts: [...facts(row), ...parts], tokens: await source.tokens(row) };
        return opened([side], missing(source));
      });
    }

    return { host, refresh };
  }

  // --- both ----------------------------------------------------------------------------------------------------------

  /** Tabs, as the ARIA practices describe them. pages: [{label, host}]. */
  function tabs(pages) {
    const id = (i) => `replies-tab-${i}`;
    const buttons = pages.map(({ label }, i) => make("button", { type: "button", role: "tab", id: id(i), "aria-controls": `${id(i)}-page`,
      onclick: () => show(i), onkeydown: (event) => {
        const to = { ArrowRight: i + 1, ArrowLeft: i - 1 }[event.key];
        if (to !== undefined) show((to + pages.length) % pages.length), buttons[(to + pages.length) % pages.length].focus();
      } }, label));
    const panels = pages.map(({ host }, i) => make("div", { role: "tabpanel", id: `${id(i)}-page`, "aria-labelledby": id(i) }, host));
    function show(chosen) {
      buttons.forEach((button, i) => (button.setAttribute("aria-selected", String(i === chosen)), (button.tabIndex = i === chosen ? 0 : -1)));
      panels.forEach((panel, i) => (panel.hidden = i !== chosen));
    }
    const bar = make("div", { role: "tablist", "aria-label": "Replies", class: "tabs" }, buttons);
    return { bar, panels, show };
  }

  async function mount(element, data, live) {
    const source = live ? served(live) : embedded(data);
    const [probes, replies] = [probeView(source), replyView(source)];
    const { bar, panels, show } = tabs([{ label: "Fixed queries", host: probes.host }, { label: "All replies", host: replies.host }]);
    element.classList.add("replies-section");
    element.replaceChildren(make("h2", {}, "Replies"), bar, ...panels);
    bar.hidden = true;
    show(1);

    async function refresh(wanted) {
      await Promise.all([probes.refresh().catch(() => {}), replies.refresh(wanted)]);
      if (probes.any && bar.hidden) {
        bar.hidden = false;
        if (wanted) show(0);
      }
    }
    await refresh(true);
    if (live) setInterval(() => document.hidden || refresh(false), EVERY);
  }

  return { mount };
})();
