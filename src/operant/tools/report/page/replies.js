// Shows the replies of a run: the probe prompts side by side, a table of all replies, and the tokens of any of them.
// The only global is `Replies`.
//
//   Replies.mount(element, data, live)    data: from replies.py; live: {base: ""} to fetch from the server instead
//
// Texts from a run are set as text, never as HTML. Colours are shares of CSS variables, so they follow the theme.
const Replies = (() => {
  const PAGE = 25; // rows of a page
  const POLL_INTERVAL = 4000; // milliseconds between two requests of the live page
  const COLUMNS = { step: "Step", reward: "Reward", kl: "KL", reply_tokens: "Tokens", end: "End", outcome: "Outcome" };
  const ENDS = { stop: "stopped", length: "length limit", world: "ended by the environment", cut: "cut" };

  const { make } = Charts.parts;

  const known = (value) => value !== null && value !== undefined;
  const fixed = (value, digits = 3) => (known(value) ? value.toFixed(Math.abs(value) >= 1000 ? 0 : digits).replace("-", "−") : "–");
  const signed = (value, digits = 3) => (value > 0 ? "+" : "") + fixed(value, digits);
  /** The number of decimals that suits all of these numbers. */
  function decimals(values) {
    const most = Math.max(0, ...values.filter(known).map(Math.abs));
    if (values.filter(known).every(Number.isInteger)) return 0;
    return most >= 100 ? 1 : most >= 10 ? 2 : most >= 0.1 ? 3 : Math.min(9, 2 - Math.floor(Math.log10(most)));
  }
  const count = (value) => value.toLocaleString("en");
  const some = (value, one, more) => `${count(value)} ${value === 1 ? one : more}`;
  const average = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

  /** Show text between backticks as code. */
  const withCode = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part));

  /** `text` with every match of the search marked. */
  function marked(text, search) {
    const parts = [], low = text.toLowerCase(), wanted = search.toLowerCase();
    let at = 0;
    // Where the lower-case text has another length, its indices do not fit the text.
    for (let next; wanted && low.length === text.length && (next = low.indexOf(wanted, at)) >= 0; at = next + wanted.length) {
      parts.push(text.slice(at, next), make("mark", {}, text.slice(next, next + wanted.length)));
    }
    return [...parts, text.slice(at)];
  }

  // --- sources of replies -------------------------------------------------------------------------------------------

  /** Replies embedded in the page; `find` returns the same as the server. */
  function embedded(data) {
    const { rows: columns, token_chunks: chunks } = data.replies;
    const names = Object.keys(columns);
    const rows = columns.step.map((_, i) => Object.fromEntries([["place", i], ...names.map((name) => [name, columns[name][i]])]));
    for (const row of rows) row.text = `${row.query}\n${row.reply}\n${row.message ?? ""}`.toLowerCase();
    const steps = [...new Set(columns.step)], outcomes = [...new Set(columns.outcome?.filter(known))].sort();
    return {
      summary: data.summary,
      probes: async () => data,
      probeTokens: async (side, step, i) => tokensAt(side.token_columns, i),
      async tokens({ place }) {
        const chunk = chunks.findLast(({ first }) => first <= place);
        return chunk ? tokensAt(chunk.token_columns, place - chunk.first) : null;
      },
      async find({ search, sort, descending, step, outcome, offset, limit }) {
        const wanted = search.toLowerCase();
        const fits = (row) => (step === null || row.step === step) && (!outcome || row.outcome === outcome) && row.text.includes(wanted);
        const found = rows.filter(fits).sort(order(sort, descending));
        return { total: found.length, rows: found.slice(offset, offset + limit), steps, outcomes, available: data.available, notes: data.notes };
      },
    };
  }

  const tokensAt = (columns, i) => columns && known(columns.tokens?.[i]) ? Object.fromEntries(PER_TOKEN.map((name) => [name, columns[name]?.[i] ?? null])) : null;

  /** Compare by the column, with unknown values last; then by step, newest first, then by row. */
  function order(sort, descending) {
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    return (a, b) => {
      const [x, y] = [a[sort], b[sort]];
      if (known(x) !== known(y)) return known(x) ? -1 : 1;
      return (descending ? compare(y, x) : compare(x, y)) || b.step - a.step || a.row - b.row;
    };
  }

  /** Replies from the server, which reads all of the run folder. */
  function served({ base }) {
    async function request(path, parameters = {}) {
      const present = Object.entries(parameters).filter(([, value]) => known(value) && value !== "");
      const query = new URLSearchParams(present.map(([name, value]) => [name, typeof value === "boolean" ? Number(value) : value]));
      const response = await fetch(`${base}${path}?${query}`, { cache: "no-store" });
      const data = await response.json();
      if (!response.ok) throw new Error(data.error);
      return data;
    }
    const tokens = async (of, step, row) => {
      const data = await request("tokens.json", { of, step, row });
      return known(data.tokens) ? data : null;
    };
    return {
      live: true,
      probes: () => request("probes.json"),
      probeTokens: (side, step, i) => tokens(step === null ? "reference" : "probes", step ?? 0, side.row[i]),
      tokens: ({ step, row }) => tokens("rollouts", step, row),
      find: (state) => request("replies.json", state),
    };
  }

  // --- tokens -------------------------------------------------------------------------------------------------------

  const PER_TOKEN = ["tokens", "logprobs", "raw_logprobs", "ref_logprobs", "values", "advantages", "passing"];
  const FLOOR = 8; // nats: a token less likely than exp(-8) has the darkest colour
  const modes = {
    logprobs: { label: "Policy log-prob", of: (t, i) => t.logprobs?.[i], scale: likely("--blue"), explanation: "darker: less likely under the policy" },
    ref_logprobs: { label: "Reference log-prob", of: (t, i) => t.ref_logprobs?.[i], scale: likely("--orange"), explanation: "darker: less likely under the reference" },
    kl: { label: "KL", of: difference, scale: around("--blue", "--orange", 1), explanation: "log-prob minus reference log-prob; blue: likelier under the policy, orange: likelier under the reference" },
    values: { label: "Value", of: (t, i) => t.values?.[i], scale: between("--green"), explanation: "the critic's estimate before the token" },
    advantages: { label: "Advantage", of: (t, i) => t.advantages?.[i], scale: around("--green", "--pink", 0.1), explanation: "green: better than expected, made likelier; pink: worse, made less likely" },
    passing: { label: "P(passed)", of: (t, i) => t.passing?.[i], scale: share("--green"), explanation: "the critic's probability that the program passes, when it has read it until this token" },
  };
  let mode = "kl"; // the choice applies to the next reply that is opened, too
  let groups = 0; // number of groups of radio buttons, for unique names

  function difference(tokens, i) {
    const [own, other] = [(tokens.raw_logprobs ?? tokens.logprobs)?.[i], tokens.ref_logprobs?.[i]];
    return known(own) && known(other) ? own - other : null;
  }

  // From all values shown, a scale makes colour(value) -> [variable, share of it] and a legend [[variable, share, text], ...].
  function likely(name) {
    return () => ({ colour: (v) => [name, Math.min(1, -v / FLOOR)], legend: [[name, 0, "0: certain"], [name, 1, `−${FLOOR} and below`]] });
  }

  function share(name) {
    return () => ({ colour: (v) => [name, v], legend: [[name, 0, "0"], [name, 1, "1"]] });
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

  /** The tokens of one reply, or of two side by side. sides: [{title, facts, query, reply, tokens}]. */
  function opened(sides, missing) {
    const tip = make("div", { class: "tip", role: "tooltip", hidden: true });
    const legend = make("p", { class: "legend" });
    const bodies = sides.map((side) => (side.tokens ? tokenList(side, tip) : make("p", { class: "text" }, make("i", {}, side.query), side.reply)));
    const has = (name) => sides.some(({ tokens }) => tokens?.tokens.some((_, i) => known(modes[name].of(tokens, i))));
    const names = Object.keys(modes).filter(has);
    if (!names.includes(mode) && names.length) mode = names[0];
    const group = `mode-${++groups}`;
    const radios = names.map((name) => make("label", {},
      make("input", { type: "radio", name: group, value: name, checked: name === mode, onchange: () => ((mode = name), paint()) }), modes[name].label));

    function paint() {
      const { of, scale, explanation } = modes[mode];
      const values = sides.flatMap(({ tokens }) => (tokens ? tokens.tokens.map((_, i) => of(tokens, i)) : [])).filter(known);
      const made = scale(values);
      legend.replaceChildren(make("span", { class: "bar", style: gradient(made.legend) }), ...made.legend.map(([, , text]) => make("b", {}, text)), make("span", {}, explanation));
      sides.forEach(({ tokens }, s) => tokens && bodies[s].querySelectorAll(".token").forEach((span, i) => {
        const value = of(tokens, i);
        const [name, share] = known(value) ? made.colour(value) : ["--paper", 0];
        span.style.setProperty("--hue", `var(${name})`);
        span.style.setProperty("--share", share.toFixed(3));
        span.setAttribute("aria-label", `${span.textContent.trim() || "space"}, ${modes[mode].label} ${fixed(value)}`);
      }));
    }
    if (names.length) paint();
    return make("div", { class: "opened" },
      names.length ? make("fieldset", { class: "modes" }, make("legend", {}, "Colour by"), radios) : make("p", { class: "missing" }, withCode(missing)),
      names.length ? legend : null,
      make("div", { class: "sides" }, sides.map((side, s) => make("div", { class: `side ${side.class ?? ""}` },
        make("p", { class: "facts-line" }, side.title ? make("b", {}, `${side.title} `) : null, side.facts.filter(known).join(" · ")),
        side.message ? make("p", { class: "message" }, side.message) : null, bodies[s]))),
      tip);
  }

  const mixed = (name, share) => `color-mix(in srgb, var(${name}) calc(${share} * var(--strength)), transparent)`;
  const gradient = (legend) => `background-image: linear-gradient(to right, ${(legend.length > 1 ? legend : [...legend, ...legend]).map(([name, share]) => mixed(name, share)).join(", ")})`;

  /** The tokens of a reply as a list that the arrow keys move through; the one pointed at or focused shows its numbers. */
  function tokenList({ query, tokens }, tip) {
    // The space before a word is put outside of it, so that lines can break there and only words are coloured.
    const cut = tokens.tokens.map((piece) => [/^ *(?=[^ ])/.exec(piece)?.[0] ?? "", piece]);
    const spans = cut.map(([space, piece], i) => make("span", { class: "token", role: "option", tabindex: i ? -1 : 0, "data-i": i },
      piece === "" ? "∅" : piece.slice(space.length).replaceAll("\n", "⏎\n")));
    const list = make("span", { role: "listbox", "aria-label": "Tokens of the reply; use the arrow keys to move through them", "aria-orientation": "horizontal" },
      spans.map((span, i) => [cut[i][0], span]));
    const host = make("p", { class: "text" }, make("i", {}, query), list);
    const at = (event) => event.target.closest(".token");
    const show = (event) => at(event) && showNumbers(at(event), tokens, tip);
    list.addEventListener("pointerover", show);
    list.addEventListener("focusin", show);
    list.addEventListener("pointerleave", () => (tip.hidden = true));
    list.addEventListener("focusout", () => (tip.hidden = true));
    list.addEventListener("keydown", (event) => {
      const next = neighbour(spans, spans.indexOf(at(event)), event.key);
      if (!next) return;
      event.preventDefault();
      for (const span of spans) span.tabIndex = span === next ? 0 : -1;
      next.focus();
    });
    return host;
  }

  /** The token that a key moves to from the i-th. */
  function neighbour(spans, i, key) {
    const [here, middle] = [spans[i], (span) => span.offsetLeft + span.offsetWidth / 2];
    const nearest = (found) => found.reduce((best, span) => (!best || (span.offsetTop === best.offsetTop && Math.abs(middle(span) - middle(here)) < Math.abs(middle(best) - middle(here))) ? span : best), null);
    if (key === "ArrowDown") return nearest(spans.filter((span) => span.offsetTop > here.offsetTop));
    if (key === "ArrowUp") return nearest(spans.filter((span) => span.offsetTop < here.offsetTop).reverse());
    return { ArrowRight: spans[i + 1], ArrowLeft: spans[i - 1], Home: spans[0], End: spans.at(-1) }[key];
  }

  /** Show the numbers of a token beside it. */
  function showNumbers(span, tokens, tip) {
    const i = Number(span.dataset.i);
    const lines = Object.entries(modes).map(([name, { label, of }]) => [name, label, of(tokens, i)]).filter(([, , value]) => known(value));
    tip.replaceChildren(make("code", {}, JSON.stringify(tokens.tokens[i])), make("dl", {}, lines.map(([name, label, value]) =>
      [make("dt", { class: name === mode ? "on" : "" }, label), make("dd", { class: name === mode ? "on" : "" }, fixed(value))])));
    tip.hidden = false;
    const panel = tip.parentElement.getBoundingClientRect(), box = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const left = Math.min(Math.max(0, box.left - panel.left), panel.width - tip.offsetWidth);
    const above = box.bottom + tip.offsetHeight + 12 > innerHeight;
    tip.style.left = `${left}px`;
    tip.style.top = `${above ? box.top - panel.top - tip.offsetHeight - 6 : box.bottom - panel.top + 6}px`;
  }

  // --- tables -------------------------------------------------------------------------------------------------------

  /** A table that its header cells sort. columns: [{name, label, class, sorts}]; state: {sort, descending}. */
  function table(caption, columns, state, changed) {
    const heads = columns.map(({ name, label, class: kind, sorts }) => make("th", { scope: "col", class: kind, "data-name": name, role: "columnheader" },
      sorts ? make("button", { type: "button", onclick: () => sortBy(name) }, label) : make("span", { class: name === "open" ? "hidden" : undefined }, label)));
    const body = make("tbody", { role: "rowgroup" });
    function sortBy(name) {
      state.descending = state.sort === name ? !state.descending : !["query", "end", "outcome"].includes(name);
      state.sort = name;
      changed();
    }
    // Roles are set explicitly, because the layout as cards on a phone would remove them from the table.
    const host = make("table", { class: "reply-table", role: "table" }, make("caption", { class: "hidden" }, caption),
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, heads)), body);
    return { host, body, heads, updateHeads: () => heads.forEach((head) => head.querySelector("button") && head.setAttribute("aria-sort",
      head.dataset.name !== state.sort ? "none" : state.descending ? "descending" : "ascending")) };
  }

  /** A row that opens with a click on it or on its button. `content` returns, or promises, the element shown below it. */
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

  /** A slider over steps. `set(steps)` keeps the selected step, or follows the newest. */
  function slider(label, moved) {
    const input = make("input", { type: "range", min: 0, max: 0, value: 0, oninput: () => (update(), moved(steps[input.value])) });
    const output = make("output", {});
    let steps = [];
    const update = () => {
      output.textContent = steps.length ? `step ${count(steps[input.value])}` : "no step";
      input.setAttribute("aria-valuetext", output.textContent);
    };
    return {
      host: make("label", { class: "slider" }, make("span", {}, label), input, output),
      get step() { return steps[input.value] ?? null; },
      set(newSteps, follows = true) {
        const step = steps[input.value], newest = follows && Number(input.value) >= steps.length - 1;
        steps = newSteps;
        input.max = Math.max(0, steps.length - 1);
        input.value = newest || !steps.includes(step) ? input.max : steps.indexOf(step);
        input.disabled = steps.length < 2;
        update();
      },
    };
  }

  const facts = (row) => [known(row.reward) ? `score ${fixed(row.reward, decimals([row.reward]))}` : "no score", known(row.kl) ? `KL ${fixed(row.kl, 2)} nats` : null,
    known(row.reply_tokens) ? `${row.reply_tokens} tokens` : null, ENDS[row.end] ?? row.end, row.outcome];

  // --- the probe prompts --------------------------------------------------------------------------------------------

  function probeView(source) {
    const state = { sort: "place", descending: false };
    let probes = null, shown = "";
    const steps = slider("Step", draw);
    const summary = make("p", { class: "summary", role: "status" }), explanation = make("p", { class: "explanation" });
    const columns = [["query", "Prompt", "query"], ["before", "Reference", "reply"], ["after", "Policy", "reply policy"], ["gain", "Gain", "n"]]
      .map(([name, label, kind]) => ({ name, label, class: kind, sorts: true }));
    const list = table("Probe prompts", [...columns, { name: "open", label: "Tokens", class: "opens" }], state, draw);
    const host = make("div", { class: "probes" }, explanation, make("div", { class: "controls" }, steps.host, summary), list.host);

    /** The answers to compare with: the reference's, else the policy's before training. */
    function baseline() {
      if (probes.reference) return { side: probes.reference, title: "Reference", step: null };
      return { side: probes.policy[0], title: `Policy, step ${probes.steps[0]}`, step: probes.steps[0] };
    }

    function draw() {
      const after = probes.policy[probes.steps.indexOf(steps.step)], { side: before, title } = baseline();
      const rows = probes.queries.map(({ query }, place) => {
        const [x, y] = [before.reward[place], after.reward[place]];
        return { place, row: place, step: 0, query, before: x, after: y, gain: known(x) && known(y) ? y - x : null };
      });
      const digits = decimals(rows.flatMap((row) => [row.before, row.after]));
      list.heads[1].firstChild.textContent = title;
      list.heads[2].firstChild.textContent = `Policy, step ${steps.step}`;
      list.updateHeads();
      explanation.textContent = `The same ${some(probes.queries.length, "prompt", "prompts")}, answered every few steps by the policy`
        + (probes.reference ? " and once by the reference, always with the same random numbers." : ", always with the same random numbers.");
      list.body.replaceChildren(...rows.sort(order(state.sort, state.descending)).map((row) => line(row, before, after, title, digits)));
      const gains = rows.map((row) => row.gain).filter(known), better = gains.filter((gain) => gain > 0).length;
      const mean = (name) => fixed(average(rows.map((row) => row[name]).filter(known)));
      summary.replaceChildren(`Mean score ${mean("before")} → `, make("b", {}, mean("after")), `; better on ${better} of ${gains.length} prompts`);
    }

    function line(row, before, after, title, digits) {
      const answer = (side) => [make("b", {}, fixed(side.reward[row.place], digits)), make("span", { class: "text" }, known(side.reply[row.place]) ? side.reply[row.place].trimStart() : "–")];
      const kind = row.gain > 0 ? "up" : row.gain < 0 ? "down" : "";
      return openable([cell("query", "", row.query), cell("reply", title, answer(before)), cell("reply policy", "Policy", answer(after)),
        cell(`n gain ${kind}`, "Gain", known(row.gain) ? signed(row.gain, digits) : "–")], 5, `Tokens of the answers to ${row.query}`, () => tokensOf(row, after));
    }

    async function tokensOf({ place, query }, after) {
      const { side: before, title, step } = baseline(), now = steps.step;
      const pair = [[before, title, step, ""], [after, `Policy, step ${now}`, now, "policy"]].filter(([side]) => known(side.reply[place]));
      return opened(await Promise.all(pair.map(async ([side, title, step, kind]) => ({
        title, class: kind, query, reply: side.reply[place], tokens: await source.probeTokens(side, step, place),
        facts: facts(Object.fromEntries(["reward", "kl", "reply_tokens", "end"].map((name) => [name, side[name][place]]))),
      }))), missing(source));
    }

    return { host, get any() { return Boolean(probes); }, async refresh() {
      const { probes: newProbes } = await source.probes(), text = source.live ? JSON.stringify(newProbes) : "";
      if (!newProbes || (probes && text === shown)) return;
      const open = list.body.querySelector(".below"), step = steps.step;
      [probes, shown] = [newProbes, text];
      steps.set(probes.steps);
      if (!open || steps.step !== step) draw(); // a reply that is open is not replaced
    } };
  }

  const missing = (source) => (source.live ? "This run did not record the tokens of this reply." : "The tokens of this reply are not on this page: "
    + "`operant report RUN --serve` shows them if the run recorded them.");

  // --- the table of replies -----------------------------------------------------------------------------------------

  function replyView(source) {
    const state = { search: "", sort: "step", descending: true, step: null, outcome: "", offset: 0, limit: PAGE };
    let requests = 0, shown = "", total = 0, timer;
    const steps = slider("Step", (step) => change({ step }));
    const all = make("input", { type: "checkbox", checked: true, onchange: () => change({ step: all.checked ? null : steps.step }) });
    const search = make("input", { type: "search", placeholder: "Search prompts and replies", "aria-label": "Search prompts and replies", oninput: () => {
      clearTimeout(timer);
      timer = setTimeout(() => change({ search: search.value }), source.live ? 200 : 60);
    } });
    const outcomes = make("select", { class: "outcome", "aria-label": "Outcome", onchange: () => change({ outcome: outcomes.value }) }, make("option", { value: "" }, "All outcomes"));
    const summary = make("p", { class: "summary", role: "status" }), notes = make("p", { class: "missing" });
    const columns = Object.entries(COLUMNS).map(([name, label]) => ({ name, label, class: ["end", "outcome"].includes(name) ? name : "n", sorts: true }));
    const list = table("Replies", [...columns, { name: "text", label: "Prompt and reply", class: "reply" }, { name: "open", label: "Tokens", class: "opens" }],
      state, () => change({}));
    const turn = (label, by) => make("button", { type: "button", onclick: () => change({ offset: state.offset + by * PAGE }) }, label);
    const [previous, next, place] = [turn("Previous", -1), turn("Next", 1), make("span", {})];
    const host = make("div", { class: "replies without-outcomes" },
      make("div", { class: "controls" }, search, outcomes, make("label", { class: "all-steps" }, all, "All steps"), steps.host, summary),
      list.host, make("div", { class: "pager" }, previous, place, next), notes);

    function change(settings) {
      Object.assign(state, "offset" in settings ? settings : { offset: 0, ...settings });
      return refresh(true);
    }

    /** requested: whether the user asked for this; otherwise it is a poll, which leaves an open reply alone. */
    async function refresh(requested) {
      const number = ++requests;
      host.setAttribute("aria-busy", "true");
      let found;
      try {
        found = await source.find(state);
      } catch (error) {
        if (requested) summary.textContent = error.message; // a poll that fails changes nothing
        return;
      }
      if (number !== requests) return; // a newer request is under mode
      host.removeAttribute("aria-busy");
      steps.set(found.steps, state.step === null);
      describe(found);
      const text = JSON.stringify(found.rows);
      if (!requested && (text === shown || list.body.querySelector(".below"))) return;
      shown = text;
      const digits = decimals(found.rows.map((row) => row.reward));
      list.body.replaceChildren(...found.rows.map((row) => line(row, digits)));
    }

    function describe(found) {
      total = found.total;
      all.checked = state.step === null;
      steps.host.classList.toggle("off", all.checked);
      list.updateHeads();
      if (found.rows.some((row) => known(row.outcome) || known(row.message))) host.classList.remove("without-outcomes"); // and they stay
      const offered = [...outcomes.options].map((option) => option.value);
      outcomes.append(...found.outcomes.filter((name) => !offered.includes(name)).map((name) => make("option", { value: name }, name)));
      const last = Math.min(state.offset + PAGE, total), { replies, steps: stepCount } = found.available;
      summary.replaceChildren(state.search || state.outcome || state.step !== null ? `${count(total)} found. ` : "",
        ...withCode(source.summary ?? (replies ? `All ${some(replies, "reply", "replies")} of ${some(stepCount, "step", "steps")} are available.` : "No replies yet.")));
      place.textContent = total ? `${count(state.offset + 1)}–${count(last)} of ${count(total)}` : "nothing found";
      previous.disabled = !state.offset;
      next.disabled = last >= total;
      notes.textContent = found.notes.join(" ");
    }

    /** The message without the outcome that it may begin with, which is shown beside it. */
  function detail({ outcome, message }) {
    const begin = `${(outcome ?? "").replace("/", ": ")}: `;
    return message?.startsWith(begin) ? message.slice(begin.length) : (message ?? "");
  }

  function line(row, digits) {
      return openable([
        cell("n", "Step", String(row.step)), cell("n reward", "Reward", fixed(row.reward, digits)), cell("n", "KL", fixed(row.kl, 2)),
        cell("n", "Tokens", known(row.reply_tokens) ? String(row.reply_tokens) : "–"), cell("end", "End", ENDS[row.end] ?? row.end ?? "–"),
        cell("outcome", "Outcome", make("b", {}, row.outcome ?? (row.message ? "" : "–")), make("span", { class: "message" }, marked(detail(row), state.search))),
        cell("reply", "", make("span", { class: "text" }, make("i", {}, marked(row.query ?? "", state.search)), marked(row.reply ?? "", state.search))),
      ], 8, `Tokens of the reply to ${row.query}`, async () => {
        const parts = Object.keys(row).filter((name) => name.startsWith("reward/")).map((name) => `${name.slice(7)} ${fixed(row[name])}`);
        const side = { title: `Step ${row.step}`, query: row.query, reply: row.reply, facts: [...facts(row), ...parts], message: detail(row), tokens: await source.tokens(row) };
        return opened([side], missing(source));
      });
    }

    return { host, refresh };
  }

  // --- the section --------------------------------------------------------------------------------------------------

  /** Tabs after the ARIA practices. pages: [{label, host}]. */
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
    const { bar, panels, show } = tabs([{ label: "Probe prompts", host: probes.host }, { label: "All replies", host: replies.host }]);
    element.classList.add("replies-section");
    element.replaceChildren(bar, ...panels);
    bar.hidden = true;
    show(1);

    async function refresh(requested) {
      await Promise.all([probes.refresh().catch(() => {}), replies.refresh(requested)]);
      if (probes.any && bar.hidden) {
        bar.hidden = false;
        if (requested) show(0);
      }
    }
    await refresh(true);
    if (live) setInterval(() => document.hidden || refresh(false), POLL_INTERVAL);
  }

  return { mount };
})();
