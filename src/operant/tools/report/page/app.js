// Lays out the page of one run from the data of run_report.py; the live page fetches new data repeatedly.
// Texts from a run are set as text, never as HTML.
(() => {
  const $ = (selector) => document.querySelector(selector);
  const main = $("#page");
  const live = Boolean($("meta[name=live]"));
  const FIRST = 3; // findings shown before the others are unfolded
  const POLL_INTERVAL = 4000; // milliseconds between two requests of the live page
  let data = JSON.parse($("#data").textContent);
  const drawn = new Map(); // figures by id
  let unfolded = false,
    opened = false;
  const figureOf = new Map(); // metric -> id of the figure that shows it

  const number = Charts.number;
  const { make } = Charts.parts;

  // --- drawing ------------------------------------------------------------------------------------------------------

  function section({ id }, specs) {
    const host = $(`#${id}`);
    host.hidden = !specs.length;
    const grid = host.querySelector(".charts") ?? host.firstChild.appendChild(make("div", { class: "charts" }));
    specs.forEach((spec) => figure(spec.small ? panel(grid) : grid, spec));
  }

  /** A section that folds; on a phone all begin folded, as they would be twenty screens, until `openFirst`. */
  function folding({ id, title, about }) {
    const details = make("details", {}, make("summary", {}, make("h2", {}, title), make("span", {}, about)));
    details.open = !matchMedia("(max-width: 40rem)").matches;
    return make("section", { id }, details);
  }

  /** Open the first section with charts, once: which one that is depends on the run. */
  function openFirst() {
    const first = Figures.SECTIONS.map(({ id }) => $(`#${id}`)).find((host) => !host.hidden);
    if (!first || opened) return;
    opened = true;
    unfold(first);
  }

  const unfold = (host) => host?.querySelectorAll(":scope > details").forEach((it) => (it.open = true));

  /** The frame around the small charts. */
  function panel(grid) {
    const known = grid.querySelector(".panel");
    if (known) return known;
    const made = make("div", { class: "panel" });
    grid.append(
      make(
        "div",
        { class: "panel-frame" },
        make("h3", {}, "Text statistics"),
        made,
        make(
          "figcaption",
          {},
          "Shares of the replies, of their words or of their characters. All metrics, below, explains each of them.",
        ),
      ),
    );
    return made;
  }

  function figure(grid, spec) {
    for (const metric of spec.metrics) figureOf.set(metric, `chart-${spec.id}`);
    const known = drawn.get(spec.id);
    if (known?.kind === spec.kind && known.title === spec.title) return known.chart.update(spec);
    known?.chart.remove(); // what stayed the same for a while is a chart from its first change on
    const host =
      document.getElementById(`chart-${spec.id}`) ??
      grid.appendChild(make("figure", { id: `chart-${spec.id}`, ...(spec.hint ? { title: spec.hint } : {}) }));
    host.className = spec.class ?? "";
    drawn.set(spec.id, { kind: spec.kind, title: spec.title, chart: Charts[spec.kind](host, spec) });
  }

  function overview() {
    const [step, of] = data.steps,
      worst = data.findings[0]?.level;
    const count = (level) => data.findings.filter((f) => f.level === level).length;
    const counts = ["problem", "warning", "note"].map((level) => [count(level), level]).filter(([n]) => n);
    const health = !step
      ? []
      : counts.length
        ? counts.flatMap(([n, level], i) => [
            i ? ", " : " · ",
            make("b", { class: level }, `${n} ${level}${n > 1 ? "s" : ""}`),
          ])
        : [" · ", make("b", { class: "fine" }, "no findings")];
    const host = $("#overview");
    host.replaceChildren(
      make(
        "p",
        { class: "status" },
        `${data.name} · step ${number(step)}${of ? ` of ${number(of)}` : ""}`,
        ...health,
        live ? make("span", { class: "live" }, " · live") : "",
      ),
      make("p", { class: "verdict" }, arrows(data.verdict)),
      data.cycle ? make("p", { class: "task" }, data.cycle.sentence) : "",
      $("#cycle") ?? make("figure", { id: "cycle" }),
      step
        ? ""
        : make(
            "p",
            { class: "soft" },
            live
              ? "This page updates itself while the run is in progress."
              : "The run rewrites this page every few seconds; reload it to see progress.",
          ),
      data.numbers.length ? make("dl", { class: "numbers" }, data.numbers.map(keyNumber)) : "",
      make("div", { class: data.findings.length ? "overview" : "overview calm" }, step ? findings() : null, samples()),
    );
    if (data.cycle) Cycle.show($("#cycle"), data.cycle);
    document.title = `${data.name} · step ${step}`;
    host.dataset.worst = worst ?? "";
  }

  const arrows = (text) => text.replaceAll("->", "→").replaceAll(" %", "\u00a0%");

  function keyNumber({ label, note, unit, before, after }) {
    const value =
      unit === "s"
        ? duration(after)
        : [
            before === undefined ? null : make("span", {}, `${number(before)} → `),
            number(after),
            unit ? make("small", {}, ` ${unit}`) : null,
          ];
    return make("div", { class: "number" }, make("dt", {}, label), make("dd", {}, value), make("dd", { class: "note" }, note));
  }

  function duration(seconds) {
    if (seconds < 90) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  function findings() {
    const list = data.findings.map(finding);
    const shown = list.length > FIRST + 1 ? FIRST : list.length;
    const more = list.slice(shown);
    const rest = make(
      "details",
      { ontoggle: () => (unfolded = rest.open) },
      make("summary", {}, `${more.length} more`),
      make("ul", { class: "findings" }, more),
    );
    rest.open = unfolded; // stays open when new data arrives
    return make(
      "div",
      { id: "diagnosis" },
      make("h2", {}, "Diagnosis"),
      list.length ? make("ul", { class: "findings" }, list.slice(0, shown)) : make("p", { class: "no-findings" }, "No findings."),
      more.length ? rest : null,
    );
  }

  function finding({ level, message, cause, remedy, metrics }) {
    const chip = (metric) => make("button", { type: "button", onclick: () => scrollTo(metric) }, metric);
    return make(
      "li",
      { class: level },
      make("p", { class: "level" }, level),
      make("p", { class: "message" }, marked(arrows(message))),
      make("p", { class: "soft" }, "Cause: ", marked(cause)),
      make("p", {}, "Remedy: ", marked(remedy)),
      make("div", { class: "chips" }, metrics.map(chip)),
    );
  }

  /** Highlight text between backticks, such as an option. */
  const marked = (text) => text.split("`").map((part, i) => (i % 2 ? make("code", { class: "option" }, part) : part));

  function scrollTo(metric) {
    const host = document.getElementById(figureOf.get(metric) ?? "metrics");
    if (host.tagName === "DETAILS") host.open = true;
    unfold(host.closest("section"));
    host.scrollIntoView({ block: "center" });
    host.classList.remove("highlighted");
    requestAnimationFrame(() => host.classList.add("highlighted"));
  }

  function samples() {
    if (!data.samples?.rows.length) return null;
    const { before, after, of, better, queries, rows } = data.samples;
    const scored = rows.some((row) => [row.before, row.after].some((answer) => typeof answer?.reward === "number"));
    const some = (n, things) => `${n} ${n === 1 ? things.replace(/ies$/, "y").replace(/s$/, "") : things}`;
    const signed = (gain) => (gain > 0 ? "+" : "") + number(gain);
    const picked = better === null
      ? `the first ${rows.length} of ${some(of, queries)}`
      : `to ${some(of, queries)}, ${better} score${better === 1 ? "s" : ""} higher than before; here ${rows.length === 1 ? "is" : "are"} the ${rows.map((row) => row.pick).join(", ")} gain`;
    const cell = (label, query, answer, pick) =>
      make(
        "td",
        { "data-label": label },
        pick ?? null,
        answer
          ? [
              scored ? make("b", {}, answer.reward === null ? "no score" : number(answer.reward)) : null,
              make("div", { class: "text" }, make("i", {}, query), answer.reply),
            ]
          : "–",
      );
    const gain = ({ pick, gain: by }) => pick ? make("p", { class: "pick" }, `${pick} gain `, make("b", { class: by > 0 ? "fine" : by < 0 ? "problem" : "" }, signed(by))) : null;
    return make(
      "div",
      { id: "samples" },
      make(
        "h2",
        {},
        "Replies ",
        make("span", {}, picked),
      ),
      make(
        "table",
        { class: "samples" },
        make("thead", {}, make("tr", {}, make("th", { class: "picked" }), make("th", {}, before), make("th", {}, after))),
        make(
          "tbody",
          {},
          rows.map((row) =>
            make("tr", {}, make("td", { class: "picked" }, gain(row)), cell(before, row.query, row.before), cell(after, row.query, row.after)),
          ),
        ),
      ),
      data.replies || live
        ? make("a", { class: "more", href: "#replies", onclick: showReplies }, "All replies, with the log-prob and value of every token")
        : null,
    );
  }

  function showReplies() {
    unfold($("#replies"));
    document.querySelectorAll("#replies [role=tab]").forEach((tab) => tab.textContent === "All replies" && tab.click());
  }

  function details() {
    const rows = data.metrics.map((m) =>
      make(
        "tr",
        {},
        make("td", {}, make("code", {}, m.name)),
        make("td", { class: "n" }, number(m.first)),
        make(
          "td",
          { class: m.odd ? "n odd" : "n", ...(m.odd ? { title: "outside the healthy range" } : {}) },
          number(m.last) + (m.odd ? " !" : ""),
        ),
        make("td", {}, m.healthy ?? ""),
        make("td", {}, (m.meaning ?? "") + (m.unit && m.unit !== "share" ? ` (${m.unit})` : "")),
      ),
    );
    const head = ["metric", "first", "newest", "healthy", "meaning"].map((t, i) =>
      make("th", { class: i === 1 || i === 2 ? "n" : "" }, t),
    );
    const facts = Object.entries(data.environment).filter(([, value]) => value !== null && value !== "");
    fold(
      "metrics",
      "All metrics",
      rows.length
        ? make("table", { class: "all" }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows))
        : null,
    );
    fold(
      "machine",
      "Versions and machine",
      facts.length
        ? make(
            "dl",
            { class: "facts" },
            facts.flatMap(([name, value]) => [
              make("dt", {}, name.replaceAll("_", " ")),
              make("dd", {}, typeof value === "number" ? number(value) : String(value)),
            ]),
          )
        : null,
    );
    fold("config", "Configuration", data.config ? make("pre", {}, data.config) : null);
    $("#footnote").textContent = notes();
  }

  function fold(id, title, content) {
    const host =
      document.getElementById(id) ?? $("#details").appendChild(make("details", { id }, make("summary", {}, title)));
    host.hidden = !content;
    if (content) host.replaceChildren(host.querySelector("summary"), content);
  }

  /** What to know about reading the charts. */
  function notes() {
    const heatmaps = Object.values(data.histograms)
      .map((h) => h.steps)
      .filter((s) => s.length > 1);
    const texts = drawn.size
      ? ["Drag over a chart to zoom, double-click for all steps. SVG and CSV below a figure save it and its numbers."]
      : [];
    if (data.steps_per_interval > 1)
      texts.push(`The curves show the lowest and the highest value of every ${data.steps_per_interval} steps.`);
    if (heatmaps.some((s) => s[1] - s[0] > 1)) texts.push("The heatmaps show evenly spaced steps, not all of them.");
    if (heatmaps.length)
      texts.push("In a heatmap of shares, the few values beyond its edges are counted in its outermost rows.");
    return texts.join(" ");
  }

  function render() {
    const figures = Figures.of(data);
    figureOf.clear();
    overview();
    for (const it of Figures.SECTIONS) section(it, figures[it.id]);
    openFirst();
    labels();
    prompts();
    details();
    for (const link of document.querySelectorAll("nav a[href]"))
      link.hidden = $(link.getAttribute("href"))?.hidden ?? true;
  }

  function skeleton() {
    const links = [{ id: "plays", short: "Episodes" }, { id: "labels", short: "Labels" }, ...Figures.SECTIONS, { id: "replies", short: "Replies" }, { id: "details", short: "Details" }];
    main.replaceChildren(
      make(
        "nav",
        { "aria-label": "Sections" },
        make("a", { class: "run", href: "#page" }, data.name),
        links.map(({ id, short }) => make("a", { href: `#${id}`, onclick: () => unfold($(`#${id}`)) }, short)),
      ),
      make("div", { id: "overview" }),
      folding({ id: "plays", title: "Episodes", about: "games and conversations as they went, early and late, turn by turn" }),
      folding({ id: "labels", title: "Held-out labels", about: "whose choices the reward model finds, how sure it is, and where it errs most" }),
      ...Figures.SECTIONS.map(folding),
      folding({ id: "replies", title: "Replies", about: "what the policy wrote, token by token" }),
      make("div", { id: "details", class: "details" }),
      make("p", { id: "footnote", class: "footnote" }),
    );
    const reset = document.body.appendChild(
      make("button", { class: "zoomed", type: "button", onclick: () => Charts.zoom(null) }),
    );
    const show = (range) => {
      reset.hidden = !range;
      if (range) reset.textContent = `steps ${range.map((x) => number(Math.round(x))).join(" to ")} · show all`;
    };
    Charts.onzoom = show;
    show(null);
  }

  function replies() {
    const host = $("#replies");
    host.hidden = !live && !data.replies?.available.replies && !data.replies?.probes;
    const page = host.firstChild.appendChild(make("div"));
    if (!host.hidden) Replies.mount(page, data.replies ?? null, live ? { base: "" } : null);
  }

  function plays() {
    const host = $("#plays"), links = () => document.querySelectorAll("nav a[href='#plays']").forEach((link) => (link.hidden = host.hidden));
    const page = host.firstChild.appendChild(make("div"));
    host.hidden = true;
    if (live || data.games) Games.mount(page, data.games, live ? { base: "" } : null, () => ((host.hidden = false), links()));
  }

  function labels() {
    const host = $("#labels");
    host.hidden = !data.labels;
    if (data.labels) Labels.show(host.querySelector(".labels") ?? host.firstChild.appendChild(make("div", { class: "labels" })), data.labels);
  }

  /** The tables of the section, above its charts. */
  function prompts() {
    const host = $("#prompts");
    host.hidden = !data.prompts;
    if (!data.prompts) return;
    const known = host.querySelector(".prompts") ?? make("div", { class: "prompts" });
    if (!known.isConnected) host.querySelector("summary").after(known);
    Prompts.show(known, data.prompts);
  }

  async function poll() {
    try {
      const response = await fetch("data.json", { cache: "no-store" }).catch(() => null);
      $(".live").textContent = response ? " · live" : " · the server does not answer";
      if (response?.ok) {
        const newData = await response.json();
        const changed = JSON.stringify(newData) !== JSON.stringify(data);
        data = newData;
        if (changed) render();
      }
    } catch {
      // the answer was cut; the page stays as it is, and the next request may succeed
    }
    setTimeout(poll, POLL_INTERVAL);
  }

  skeleton();
  replies();
  plays();
  render();
  addEventListener("beforeprint", () => document.querySelectorAll("section").forEach(unfold));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Charts.refresh());
  if (live) setTimeout(poll, POLL_INTERVAL);
})();
