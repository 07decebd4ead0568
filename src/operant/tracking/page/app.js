// The page of one run: lays out what report.py tells, draws it with Charts, and, live, asks for news.
// Texts from a run are set as text, never as HTML.
(() => {
  const $ = (selector) => document.querySelector(selector);
  const main = $("#page");
  const live = Boolean($("meta[name=live]"));
  const EVERY = 4000; // milliseconds between two questions of the live page
  let data = JSON.parse($("#data").textContent);
  let told; // what the metrics mean, by name
  const drawn = new Map(); // figures by id
  const shows = new Map(); // metric -> id of the figure that shows it

  const number = Charts.number;
  function make(tag, attributes = {}, ...children) {
    const { class: name, ...rest } = attributes;
    const made = document.createElement(tag);
    if (name) made.className = name;
    for (const [key, value] of Object.entries(rest)) key.startsWith("on") ? (made[key] = value) : made.setAttribute(key, value);
    made.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return made;
  }

  // --- curves --------------------------------------------------------------------------------------------------------

  /** {x, values} of a metric; null where it was never a number. */
  function curve(name) {
    const found = data.curves.of[name];
    if (!found) return null;
    const [x, values] = Array.isArray(found) ? [data.curves.steps, found] : [found.steps, found.values];
    return values.some((v) => v !== null) ? { x, values } : null;
  }

  function series(name, label, colour, more = {}) {
    const found = curve(name);
    if (!found) return null;
    const spread = more.spread === undefined ? curve(name.endsWith("/mean") ? name.replace(/mean$/, "std") : `${name}_std`) : more.spread;
    const fits = spread && spread.values.length === found.values.length;
    return { label, colour, ...found, ...more, spread: fits ? spread.values : undefined };
  }

  function explained(name) {
    const { meaning = "", healthy = "" } = told.get(name) ?? {};
    const sentence = meaning && meaning[0].toUpperCase() + meaning.slice(1) + ".";
    return healthy ? `${sentence} Healthy: ${healthy}.` : sentence;
  }

  /** A line figure of the given series; null where none is known. The first metric's registry entry explains it. */
  function lines(id, title, wanted, more = {}) {
    const known = wanted.filter((s) => s && !(more.stacked && s.values.every((v) => !v)));
    if (!known.length) return null;
    const metrics = more.metrics ?? [];
    const { unit = "", band } = told.get(metrics[0]) ?? {};
    return { id, title, unit, kind: "line", caption: explained(metrics[0]), band: band ?? undefined, ...more, metrics, series: known };
  }

  const single = (name, title, more = {}) =>
    lines(name.replaceAll("/", "-"), title, [series(name, title, "--blue", more.of)], { metrics: [name], ...more });

  function heat(name, title, caption, more = {}) {
    const found = data.heats[name];
    if (!found) return null;
    const { steps, ...grid } = found;
    return { id: `heat-${name}`, title, caption, kind: "heat", x: steps, ...grid, metrics: [], ...more };
  }

  function blocks(kind, title, caption) {
    const found = data.blocks[kind];
    if (!found) return null;
    const height = Math.max(120, Math.min(300, 40 + 18 * found.names.length));
    return { id: `blocks-${kind}`, class: "wide", title, caption, kind: "heat", x: found.steps, names: found.names, columns: found.columns,
      ramp: "--ramp-size", height, metrics: [] };
  }

  // --- what is drawn, in order ---------------------------------------------------------------------------------------

  const SECTIONS = [
    { id: "reward", title: "Reward", figures: reward },
    { id: "distance", title: "Distance from the reference", figures: distance },
    { id: "update", title: "The update", figures: update },
    { id: "lengths", title: "Lengths and text", figures: lengths },
    { id: "gradients", title: "Gradients and weights", figures: gradients },
    { id: "parts", title: "Parts of the reward", figures: parts },
    { id: "time", title: "Time and memory", figures: time },
  ];

  function reward() {
    const scored = curve("evaluate/reward") ? "evaluate/reward" : "probe/reward";
    const { x } = curve(scored) ?? {}, score = curve("probe/reference_reward")?.values.findLast((v) => v !== null);
    const reference = scored === "probe/reward" && x && score !== undefined ? { x, values: x.map(() => score) } : null; // asked once
    const held = scored === "evaluate/reward" ? "Reward on held-out tasks" : "Reward on the fixed probe queries";
    return [
      single("reward/mean", "Reward", { caption: `${explained("reward/mean")} Shade: one standard deviation over the replies.` }),
      single("reward/kl_penalty", "What KL cost", { include: [0] }),
      single("reward/return", "Reward after KL penalty"),
      heat("reward", "Where the rewards lie", "Each column is one step's replies: the stronger the colour, the more of them got this reward.",
        { class: "full", metrics: ["reward/std", "reward/min", "reward/max"] }),
      lines("held-out", held, [series(scored, "policy", "--blue"),
        reference && { label: "reference", colour: "--orange", ...reference, dash: [5, 4] }],
        { metrics: [scored, "probe/reward", "probe/reference_reward"], band: undefined }),
    ];
  }

  function distance() {
    const exploited = "Both lines are about the policy's own replies. Together: the replies stay likely text. A gap that opens, the reference's line "
      + "falling: the policy earns its reward with text that the reference would hardly write.";
    const target = data.target === null ? "" : ` Dashed: the target, ${number(data.target)}.`;
    return [
      single("kl/per_reply", "KL per reply", { class: "full", include: [0, 10], target: data.target ?? undefined,
        metrics: ["kl/per_reply", "kl/per_token", "kl/k3", "kl/paid"],
        caption: `${explained("kl/per_reply")} Shade: one standard deviation over the replies.${target}` }),
      heat("kl_per_reply", "Where the KL of the replies lies", "Each column is one step's replies. A few far above the rest are the ones to read.",
        { class: "tall", height: 330, unit: "nats", metrics: ["kl/per_reply_std"] }),
      single("kl/coef", "KL coefficient", { class: "full", height: 110, include: [0] }),
      lines("logprobs", "How likely the replies are, per token", [
        series("rollout/logprob_mean", "under the policy", "--blue", { spread: null }),
        series("rollout/ref_logprob_mean", "under the reference", "--orange", { spread: null })],
        { caption: exploited, gap: true, metrics: ["rollout/logprob_mean", "rollout/ref_logprob_mean"], band: undefined }),
      ...logprobs(),
    ];
  }

  /** The two heatmaps on one scale, so that they can be compared at a glance. */
  function logprobs() {
    const pair = [
      heat("logprobs", "Token log-probs under the policy", "Which log-probs the chosen tokens have, step by step.", { unit: "nats" }),
      heat("ref_logprobs", "The same tokens under the reference", "If this picture sinks while the left one does not, the policy exploits text that "
        + "only it finds likely.", { unit: "nats", ramp: "--ramp-reference" }),
    ];
    return pair;
  }

  function update() {
    const floor = (curve("value/explained_variance")?.values.findLast((v) => v !== null) ?? 0) < -1 ? undefined : -1;
    const low = floor !== undefined && curve("value/explained_variance")?.values.some((v) => v < floor);
    return [
      single("policy/entropy", "Entropy", { include: [0] }),
      single("policy/clip_fraction", "Clip fraction", { include: [0] }),
      lines("ratio", "Ratio of new to old probability", [
        series("policy/ratio_max", "largest", "--orange"), series("policy/ratio_mean", "mean", "--blue", { spread: null }),
        series("policy/ratio_min", "smallest", "--green")],
        { log: true, band: undefined, include: [0.9, 1.1], metrics: ["policy/ratio_max", "policy/ratio_min", "policy/ratio_mean", "policy/ratio_std"],
          caption: "New over old probability of a token, logarithmic. Near 1 the update is the one that PPO means; largest above 200 or smallest below 0.005 is trouble." }),
      single("policy/approx_kl", "Size of the update"),
      single("value/explained_variance", "Critic: explained variance", { floor, include: [0, 1],
        caption: explained("value/explained_variance") + (low ? " Drawn from −1 upwards." : "") }),
      single("value/loss", "Critic: loss", { include: [0] }),
    ];
  }

  function lengths() {
    return [
      single("rollout/reply_tokens", "Length of the replies", { include: [0], caption: `${explained("rollout/reply_tokens")} Shade: one standard deviation.` }),
      heat("reply_tokens", "Where the lengths lie", "Each column is one step's replies.", { unit: "tokens", metrics: ["rollout/reply_tokens_std"] }),
      lines("ends", "How the replies ended", [
        series("rollout/ended_stop", "stopped", "--blue"), series("rollout/ended_length", "at the length limit", "--sky"),
        series("rollout/ended_cut", "cut by a step limit", "--orange")],
        { stacked: true, percent: true, unit: "", band: undefined, metrics: ["rollout/ended_stop", "rollout/ended_length", "rollout/ended_cut"],
          caption: "Shares of the replies that ended by themselves, at the task's own limit, or because a world's step limit cut them." }),
      ...[["text/empty", "Empty replies"], ["text/top_word", "Commonest word"], ["text/distinct_1", "Distinct words"],
        ["text/distinct_2", "Distinct pairs"], ["text/repeated", "Repeated phrases"], ["text/exclamations", "Exclamation marks"],
        ["text/emojis", "Emojis"], ["text/non_letters", "Odd characters"]].map(([name, title]) =>
        single(name, title, { small: true, percent: true, band: undefined, unit: "", include: [0], hint: explained(name), caption: "" })),
    ];
  }

  function gradients() {
    return [
      lines("grad-norm", "Gradient norm", [
        series("update/grad_norm", "before clipping", "--orange"), series("update/grad_norm_clipped", "after clipping", "--blue")],
        { class: "wide", metrics: ["update/grad_norm", "update/grad_norm_clipped", "update/not_finite"], include: [0] }),
      blocks("gradient", "Gradient by block", "Norm of the gradient in each part of the model, first layers on top; colours are logarithmic."),
      blocks("update", "Change of the weights by block", "Norm of what the update changed, against the step."),
      blocks("weight", "Weights by block", "Norm of the weights themselves."),
    ];
  }

  function parts() {
    const names = Object.keys(data.curves.of).filter((name) => /^reward\/.+\/mean$/.test(name));
    if (names.length < 2) return [];
    return names.map((name) => single(name, name.slice(7, -5), { of: { spread: curve(name.replace(/mean$/, "std")) } }));
  }

  function time() {
    const phases = [["generate", "--blue"], ["reward", "--orange"], ["observe", "--green"], ["advantage", "--pink"], ["update", "--sky"],
      ["evaluate", "--yellow"], ["probe", "--red"], ["track", "--grey"]];
    return [
      lines("phases", "Seconds a step, by phase", phases.map(([name, colour]) => series(`time/${name}`, name, colour)),
        { stacked: true, class: "full tall", height: 330, unit: "s", metrics: ["time/step", ...phases.map(([name]) => `time/${name}`)], caption:
          "generate: sampling replies; reward: judging them; observe: values and reference; update: the optimizer; evaluate and probe: looks on the way; track: writing down." }),
      single("tokens/per_second", "Tokens per second", { include: [0], height: 110 }),
      lines("memory", "Memory", [series("memory/resident_gb", "process", "--blue"), series("memory/gpu_gb", "GPU", "--orange")],
        { unit: "GB", include: [0], height: 110, metrics: ["memory/resident_gb", "memory/gpu_gb"] }),
    ];
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  function section({ id, title, figures }) {
    const wanted = figures().filter(Boolean);
    const host = $(`#${id}`);
    host.hidden = !wanted.length;
    if (!wanted.length) return;
    const grid = host.querySelector(".charts") ?? host.appendChild(make("div", { class: "charts" }));
    if (!host.querySelector("h2")) host.prepend(make("h2", {}, title));
    wanted.forEach((spec) => figure(spec.small ? panel(grid) : grid, spec));
  }

  /** Where the small charts stand. */
  function panel(grid) {
    const known = grid.querySelector(".panel");
    if (known) return known;
    const made = make("div", { class: "panel" });
    grid.append(make("div", { class: "panel-frame" }, make("h3", {}, "How the replies read"), made,
      make("figcaption", {}, "Shares of the replies, of their words or of their characters; what each means stands under All metrics.")));
    return made;
  }

  function figure(grid, spec) {
    for (const metric of spec.metrics) shows.set(metric, `chart-${spec.id}`);
    const known = drawn.get(spec.id);
    if (known) return known.update(spec);
    const host = grid.appendChild(make("figure", { id: `chart-${spec.id}`, class: spec.class ?? "", ...(spec.hint ? { title: spec.hint } : {}) }));
    drawn.set(spec.id, Charts[spec.kind](host, spec));
  }

  function glance() {
    const [step, of] = data.steps, worst = data.findings[0]?.level;
    const count = (level) => data.findings.filter((f) => f.level === level).length;
    const counts = ["problem", "warning", "note"].map((level) => [count(level), level]).filter(([n]) => n);
    const health = !step ? [] : counts.length
      ? counts.flatMap(([n, level], i) => [i ? ", " : " · ", make("b", { class: level }, `${n} ${level}${n > 1 ? "s" : ""}`)])
      : [" · ", make("b", { class: "fine" }, "nothing unhealthy")];
    const host = $("#glance");
    host.replaceChildren(
      make("p", { class: "status" }, `${data.name} · step ${number(step)}${of ? ` of ${number(of)}` : ""}`, ...health, live ? " · live" : ""),
      make("p", { class: "verdict" }, arrows(data.verdict)),
      step ? "" : make("p", { class: "soft" }, live ? "This page fills itself as the run goes on." : "The run writes this page anew every few seconds: reload it then."),
      data.numbers.length ? make("dl", { class: "numbers" }, data.numbers.map(keyNumber)) : "",
      make("div", { class: data.findings.length ? "glance" : "glance calm" }, step ? findings() : null, teaser()),
    );
    document.title = `${data.name} · step ${step}`;
    host.dataset.worst = worst ?? "";
  }

  const arrows = (text) => text.replaceAll("->", "→");

  function keyNumber({ label, unit, before, after }) {
    const value = unit === "s" ? duration(after) : [before === undefined ? null : make("span", {}, `${number(before)} → `), number(after),
      unit ? make("small", {}, ` ${unit}`) : null];
    return make("div", { class: "number" }, make("dt", {}, label), make("dd", {}, value));
  }

  function duration(seconds) {
    if (seconds < 90) return `${Math.round(seconds)} s`;
    const minutes = Math.round(seconds / 60);
    return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }

  function findings() {
    const list = data.findings.map((f) => make("li", { class: f.level },
      make("p", { class: "level" }, f.level),
      make("p", { class: "says" }, arrows(f.says)),
      make("p", { class: "soft" }, "Cause: ", f.cause),
      make("p", {}, "Remedy: ", ...remedy(f.remedy)),
      make("div", { class: "chips" }, f.metrics.map((metric) => make("button", { type: "button", onclick: () => scrollTo(metric) }, metric)))));
    return make("div", { id: "diagnosis" }, make("h2", {}, "Diagnosis"), list.length ? make("ul", { class: "findings" }, list)
      : make("p", { class: "silent" }, "No complaint: KL, lengths, text, ratios, critic and reward look as they should."));
  }

  /** Options and code of a remedy stand out. */
  const remedy = (text) => text.split(/(`[^`]+`)/).map((part) => (part.startsWith("`") ? make("code", { class: "option" }, part.slice(1, -1)) : part));

  function scrollTo(metric) {
    const host = document.getElementById(shows.get(metric) ?? "metrics");
    if (host.tagName === "DETAILS") host.open = true;
    host.scrollIntoView({ block: "center" });
    host.classList.remove("found");
    requestAnimationFrame(() => host.classList.add("found"));
  }

  function teaser() {
    if (!data.teaser?.rows.length) return null;
    const { before, after, of, rows } = data.teaser;
    const cell = (label, query, said) => make("td", { "data-label": label }, said
      ? [make("b", {}, said.reward === null ? "no score" : number(said.reward)), make("div", { class: "said" }, make("i", {}, query), said.reply)] : "–");
    return make("div", { id: "teaser" }, make("h2", {}, "What it says now ", make("span", {}, `the first ${rows.length} of ${of} fixed queries, with their scores`)),
      make("table", { class: "teaser" },
        make("thead", {}, make("tr", {}, make("th", {}, before), make("th", {}, after))),
        make("tbody", {}, rows.map((row) => make("tr", {}, cell(before, row.query, row.before), cell(after, row.query, row.after))))),
      data.replies || live ? make("a", { class: "more", href: "#replies" }, "All replies, with the numbers of every token") : null);
  }

  function lookups() {
    const rows = data.metrics.map((m) => make("tr", {},
      make("td", {}, make("code", {}, m.name)), make("td", { class: "n" }, number(m.first)),
      make("td", { class: m.odd ? "n odd" : "n", ...(m.odd ? { title: "outside of the healthy range" } : {}) }, number(m.last) + (m.odd ? " !" : "")),
      make("td", {}, m.healthy ?? ""), make("td", {}, (m.meaning ?? "") + (m.unit ? ` (${m.unit})` : ""))));
    const head = ["metric", "first", "newest", "healthy", "meaning"].map((t, i) => make("th", { class: i === 1 || i === 2 ? "n" : "" }, t));
    const facts = Object.entries(data.environment).filter(([, value]) => value !== null && value !== "");
    fold("metrics", "All metrics", rows.length ? make("table", { class: "all" }, make("thead", {}, make("tr", {}, head)), make("tbody", {}, rows)) : null);
    fold("machine", "Versions and machine", facts.length ? make("dl", { class: "facts" },
      facts.flatMap(([name, value]) => [make("dt", {}, name.replaceAll("_", " ")), make("dd", {}, String(value))])) : null);
    fold("config", "Configuration", data.config ? make("pre", {}, data.config) : null);
    $("#aside").textContent = thinned();
  }

  function fold(id, title, content) {
    const host = document.getElementById(id) ?? $("#lookup").appendChild(make("details", { id }, make("summary", {}, title)));
    host.hidden = !content;
    if (content) host.replaceChildren(host.querySelector("summary"), content);
  }

  function thinned() {
    const heats = Object.values(data.heats).map((h) => h.steps).filter((s) => s.length > 1);
    const said = drawn.size ? ["Drag over a chart to zoom, double-click for all steps."] : [];
    if (data.stretch > 1) said.push(`Of every ${data.stretch} steps, the curves show the lowest and the highest value.`);
    if (heats.some((s) => s[1] - s[0] > 1)) said.push("The heatmaps show some of the steps, evenly.");
    if (heats.length) said.push("In a heatmap of shares, the few values beyond its edges are counted in its outermost rows.");
    return said.join(" ");
  }

  function render() {
    told = new Map(data.metrics.map((m) => [m.name, m]));
    shows.clear();
    glance();
    SECTIONS.forEach(section);
    lookups();
    for (const link of document.querySelectorAll("nav a[href]")) link.hidden = $(link.getAttribute("href"))?.hidden ?? true;
  }

  function skeleton() {
    const links = [...SECTIONS, { id: "replies", title: "Replies" }, { id: "lookup", title: "Details" }];
    const short = { distance: "Distance", update: "Update", lengths: "Text", gradients: "Gradients", parts: "Parts", time: "Time" };
    main.replaceChildren(
      make("nav", { "aria-label": "Sections" }, make("a", { class: "run", href: "#page" }, data.name),
        links.map(({ id, title }) => make("a", { href: `#${id}` }, short[id] ?? title))),
      make("div", { id: "glance" }),
      ...SECTIONS.map(({ id }) => make("section", { id })),
      make("section", { id: "replies" }),
      make("div", { id: "lookup", class: "lookup" }),
      make("p", { id: "aside", class: "aside" }),
    );
    const reset = document.body.appendChild(make("button", { class: "zoomed", type: "button", onclick: () => Charts.zoom(null) }));
    const show = (range) => {
      reset.hidden = !range;
      if (range) reset.textContent = `steps ${range.map((x) => number(Math.round(x))).join(" to ")} · show all`;
    };
    Charts.onzoom = show;
    show(null);
  }

  function replies() {
    const host = $("#replies");
    host.hidden = !live && !data.replies?.exist.replies && !data.replies?.probes;
    if (!host.hidden) Replies.mount(host, data.replies ?? null, live ? { base: "" } : null);
  }

  async function ask() {
    try {
      const answer = await fetch("data.json", { cache: "no-store" });
      if (answer.ok) {
        const news = await answer.json();
        const changed = JSON.stringify(news) !== JSON.stringify(data);
        data = news;
        if (changed) render();
      }
    } catch {
      // the server is gone; what is drawn stays, and the next question may be answered again
    }
    setTimeout(ask, EVERY);
  }

  skeleton();
  replies();
  render();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Charts.refresh());
  if (live) setTimeout(ask, EVERY);
})();
