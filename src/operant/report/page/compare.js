// Lays out the page of several runs from the data of compare.py: reward against KL, replies to the same queries, curves,
// a table. Texts from a run are set as text, never as HTML.
(() => {
  const data = JSON.parse(document.querySelector("#data").textContent);
  const main = document.querySelector("#page");
  const number = Charts.number;
  const { groups, runs } = data;

  function fill(made, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) {
      if (value === null || value === undefined) continue;
      if (key.startsWith("on")) made[key] = value;
      else if (key.startsWith("--")) made.style.setProperty(key, value);
      else made.setAttribute(key, value);
    }
    made.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return made;
  }
  const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  const colour = (group) => ({ "--group": `var(--g${group})` });
  const swatch = (group) => make("i", { class: "swatch", ...(group === null ? {} : colour(group)) });
  const share = (value) => (value === null || value === undefined ? "–" : `${number(100 * value)} %`);

  // --- colours ------------------------------------------------------------------------------------------------------

  const DISTINCT = ["#1f6fb5", "#d17a00", "#0b8a6a", "#b8568f", "#63b2de", "#c4460f", "#c9a90c", "#7a5ba6"];
  const DISTINCT_DARK = ["#6bb1ee", "#f2a33c", "#3cc49d", "#dc8fbd", "#3d7fab", "#ef7c4b", "#e3c94a", "#b79af0"];
  const ORDERED = ["#43308f", "#1f6fb5", "#0b8a6a", "#c09000", "#c4460f", "#8f1d3c"];
  const ORDERED_DARK = ["#a99bf5", "#6bb1ee", "#3cc49d", "#e3c94a", "#ef7c4b", "#f27596"];
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  function between(stops, at) {
    const place = at * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
    const [a, b] = [rgb(stops[low]), rgb(stops[low + 1])];
    return a.map((c, i) => Math.round(c + (b[i] - c) * (place - low)));
  }

  /** Settings that differ in one number get the colours of a ramp, others get distinct colours. */
  function paint() {
    const ordered = groups.every((g) => g.number !== null) || groups.length > DISTINCT.length;
    groups.forEach((_, i) => {
      const found = ordered
        ? between(dark.matches ? ORDERED_DARK : ORDERED, groups.length > 1 ? i / (groups.length - 1) : 0.2)
        : rgb((dark.matches ? DISTINCT_DARK : DISTINCT)[i]);
      document.documentElement.style.setProperty(`--g${i}`, `rgb(${found})`);
      document.documentElement.style.setProperty(`--g${i}-shade`, `rgba(${found}, .16)`);
    });
    Charts.refresh();
  }

  // --- the overview -------------------------------------------------------------------------------------------------

  function status() {
    const seeds = [...new Set(groups.map((g) => g.n))];
    const each = seeds.length === 1 ? `${seeds[0]} run${seeds[0] > 1 ? "s" : ""} of each` : `${Math.min(...seeds)} to ${Math.max(...seeds)} runs of each`;
    const many = groups.length > 1 ? `${groups.length} settings, ${each}` : "all of one setting";
    return make("p", { class: "status" }, make("b", {}, `${runs.length} runs`), `: ${many}`);
  }

  function plusMinus(interval, percent = false) {
    if (!interval) return ["–"];
    const { mean, half } = interval;
    return percent ? [share(mean)] : [number(mean), half === null ? null : make("small", {}, ` ± ${number(half)}`)];
  }

  function findingNames(findings, many) {
    if (!findings.length) return [make("span", { class: "fine" }, "none")];
    return findings.map((f) => make("span", { class: f.level, title: f.message },
      f.name.replaceAll("_", " ") + (many > 1 && f.runs < many ? ` (${f.runs} of ${many})` : "")));
  }

  const withoutNotes = (findings) => findings.filter((f) => f.level !== "note");

  function settings() {
    const head = ["setting", "reward", "KL", "empty", "top word", "findings"];
    const rows = groups.map((g, i) => make("tr", {},
      make("td", {}, swatch(i), g.label),
      [["reward", false], ["kl", false], ["empty", true], ["top_word", true]].map(([name, percent], k) =>
        make("td", { class: "n", "data-label": head[k + 1] }, ...plusMinus(g.final[name], percent))),
      make("td", { class: "finding-names" }, ...findingNames(withoutNotes(g.findings), g.n))));
    const where = data.held_out ? "On held-out tasks, after training" : "Means over the last steps";
    const spread = groups.some((g) => g.n > 1) ? "; ± is half a 95 % interval of Student's t over the seeds" : "";
    return make("div", {},
      make("table", { class: "groups" },
        make("thead", {}, make("tr", {}, ...head.map((h, i) => make("th", { class: i > 0 && i < 5 ? "n" : null }, h)))),
        make("tbody", {}, ...rows)),
      make("p", { class: "footnote", style: "margin-top:.6rem" },
        `${where}${spread}. Empty: share of the replies; top word: share of the most common word among all words.`));
  }

  // --- reward against KL --------------------------------------------------------------------------------------------

  const LEFT = 46, RIGHT = 12, TOP = 14, BOTTOM = 42;
  let WIDE = 640, HIGH = 400; // pixels, so that texts keep their size on a phone
  const root = (x) => Math.sign(x) * Math.sqrt(Math.abs(x));

  function ticks(low, high, many) {
    const rough = (high - low) / many || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
    return found;
  }

  function axes(points) {
    const xs = [0, ...points.map((p) => p.kl)], ys = points.map((p) => p.reward);
    const [left, right] = [root(Math.min(...xs)), root(Math.max(...xs, 1)) * 1.06];
    const margin = (Math.max(...ys) - Math.min(...ys)) * 0.1 || Math.abs(ys[0]) * 0.1 || 1;
    const [low, high] = [Math.min(...ys) - margin, Math.max(...ys) + margin];
    return {
      x: (kl) => LEFT + ((root(kl) - left) / (right - left || 1)) * (WIDE - LEFT - RIGHT),
      y: (reward) => HIGH - BOTTOM - ((reward - low) / (high - low)) * (HIGH - TOP - BOTTOM),
      across: [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000].filter((t) => root(t) <= right && (right < 5 || ![1, 5, 50, 500].includes(t))),
      up: ticks(low, high, 6),
    };
  }

  function frontier(host) {
    const show = () => {
      const width = Math.floor(host.clientWidth) || 640;
      if (width === host.drawn) return;
      host.drawn = WIDE = width;
      HIGH = Math.min(400, Math.max(300, Math.round(width * 0.65)));
      host.replaceChildren(plane());
    };
    new ResizeObserver(show).observe(host);
    show();
  }

  function plane() {
    const { points, front, start } = data.frontier;
    if (!points.length) return make("p", { class: "soft" }, "No run has recorded both a reward and a KL.");
    const known = groups.map((g, i) => ({ ...g, place: i })).filter((g) => g.final.kl && g.final.reward);
    const begin = start === null ? [] : [{ kl: 0, reward: start }];
    const to = axes([...points, ...begin]);
    const mean = (g) => [to.x(g.final.kl.mean), to.y(g.final.reward.mean)];
    const path = front.map((i) => mean(groups[i]).map((v) => v.toFixed(1)).join(",")).join(" ");
    const taken = known.map((g) => mean(g)).map(([x, y]) => [x - 6, y - 6, x + 6, y + 6]);
    const intervals = known.flatMap((g) => bars(g, to));
    const crossed = intervals.map((bar) => ["x1", "y2", "x2", "y1"].map((name) => Number(bar.getAttribute(name))));
    return draw("svg", { class: "frontier", width: WIDE, height: HIGH, viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": "Reward against KL" },
      draw("clipPath", { id: "inside" }, draw("rect", { x: LEFT, y: 0, width: WIDE - LEFT, height: HIGH - BOTTOM })),
      ...to.up.flatMap((t) => [draw("line", { class: "rule", x1: LEFT, x2: WIDE - RIGHT, y1: to.y(t), y2: to.y(t) }),
        draw("text", { x: LEFT - 8, y: to.y(t) + 4, "text-anchor": "end" }, number(t))]),
      ...to.across.map((t) => draw("text", { x: to.x(t), y: HIGH - BOTTOM + 18, "text-anchor": "middle" }, number(t))),
      draw("text", { x: WIDE - RIGHT, y: HIGH - 6, "text-anchor": "end" }, "KL, nats per reply (square-root scale)"),
      front.length > 1 ? draw("polyline", { class: "front", points: path }) : null,
      ...points.map((p) => draw("circle", { class: "run", ...colour(p.group), cx: to.x(p.kl), cy: to.y(p.reward), r: 3.5 },
        draw("title", {}, `${p.run}: reward ${number(p.reward)}, KL ${number(p.kl)}`))),
      begin.length ? draw("circle", { class: "start", cx: to.x(0), cy: to.y(start), r: 5 }, draw("title", {}, "before training")) : null,
      draw("g", { "clip-path": "url(#inside)" }, ...intervals),
      ...known.map((g) => draw("circle", { class: "mean", ...colour(g.place), cx: mean(g)[0], cy: mean(g)[1], r: 6.5 },
        draw("title", {}, `${g.label}: mean of ${g.n}`))),
      ...[...known].sort((a, b) => mean(a)[1] - mean(b)[1]).map((g) => label(g.label, ...mean(g), taken, crossed)),
      begin.length ? label("before training", to.x(0), to.y(start), taken, crossed) : null);
  }

  function bars(g, to) {
    const { kl, reward } = g.final, line = (x1, y1, x2, y2) => draw("line", { class: "bar", ...colour(g.place), x1, y1, x2, y2 });
    const [x, y] = [to.x(kl.mean), to.y(reward.mean)];
    return [
      kl.half === null ? null : line(to.x(kl.mean - kl.half), y, to.x(kl.mean + kl.half), y),
      reward.half === null ? null : line(x, to.y(reward.mean - reward.half), x, to.y(reward.mean + reward.half)),
    ].filter(Boolean);
  }

  /** A label beside its point where it covers nothing, if need be across an interval; null where there is no space. */
  function label(text, x, y, taken, crossed) {
    const width = 6.6 * text.length, tries = [[11, 4], [-11 - width, 4], [11, -10], [11, 18], [-11 - width, -10], [-11 - width, 18], [11, -24], [11, 32]];
    const box = ([dx, dy]) => [x + dx, y + dy - 11, x + dx + width, y + dy + 3];
    const inside = (b) => b[0] >= LEFT && b[2] <= WIDE && b[1] >= 0 && b[3] <= HIGH - BOTTOM;
    const free = (b, boxes) => boxes.every((t) => b[0] > t[2] || b[2] < t[0] || b[1] > t[3] || b[3] < t[1]);
    const fits = (boxes) => tries.find((t) => inside(box(t)) && free(box(t), boxes));
    const best = fits([...taken, ...crossed]) ?? fits(taken);
    if (!best) return null;
    taken.push(box(best));
    return draw("text", { class: "label", x: x + best[0], y: y + best[1] }, text);
  }

  // --- the replies --------------------------------------------------------------------------------------------------

  const QUERIES_SHOWN = 3;
  const seeds = [...new Set(runs.map((r) => r.seed))].filter((s) => s !== null && s !== undefined);
  const chosen = { first: 0, seed: seeds[0] ?? null };

  /** The run of each setting with the chosen seed, or else its first run. */
  function chosenRuns() {
    return groups.map((_, i) => {
      const own = runs.map((run, place) => ({ run, place })).filter(({ run }) => run.group === i);
      return { group: i, place: (own.find(({ run }) => run.seed === chosen.seed) ?? own[0]).place };
    });
  }

  function answer(name, cell, group) {
    const [text, reward] = cell ?? [null, null];
    const content = text === null ? make("span", { class: "none" }, "no answer")
      : text.trim() ? make("span", { class: "text" }, text) : make("span", { class: "none" }, "(empty)");
    return make("div", { class: group === null ? "answer reference" : "answer" },
      make("span", {}, swatch(group), name), content, make("span", { class: "n" }, reward === null ? "" : number(reward)));
  }

  function replies(host) {
    const { queries, columns, reference } = data.replies;
    if (!queries.length) return host.replaceChildren(make("p", {}, data.replies.queries_differ ? "The runs have no queries in common." : "No replies have been recorded yet."));
    const last = Math.max(0, Math.ceil(queries.length / QUERIES_SHOWN) - 1) * QUERIES_SHOWN;
    const go = (first) => { chosen.first = Math.max(0, Math.min(first, last)); replies(host); };
    const end = Math.min(chosen.first + QUERIES_SHOWN, queries.length);
    const choose = make("div", { class: "choose" },
      make("button", { type: "button", id: "earlier", onclick: () => go(chosen.first - QUERIES_SHOWN), ...(chosen.first ? {} : { disabled: "" }) }, "‹ earlier"),
      make("span", {}, `queries ${chosen.first + 1} to ${end} of ${queries.length}`),
      make("button", { type: "button", id: "later", onclick: () => go(chosen.first + QUERIES_SHOWN), ...(end < queries.length ? {} : { disabled: "" }) }, "later ›"),
      ...(seeds.length > 1 ? [make("span", { class: "soft" }, "seed"), ...seeds.map((seed) => make("button", { type: "button", class: "seed",
        "aria-pressed": String(seed === chosen.seed), onclick: () => { chosen.seed = seed; replies(host); } }, String(seed)))] : []));
    const blocks = queries.slice(chosen.first, end).map((query, k) => make("div", { class: "query-block" },
      make("p", { class: "text" }, query),
      reference ? answer(data.replies.reference_label, reference[chosen.first + k], null) : null,
      ...chosenRuns().map(({ group, place }) => answer(groups[group].label, columns[place].answers[chosen.first + k], group))));
    host.replaceChildren(choose, ...blocks);
  }

  // --- curves -------------------------------------------------------------------------------------------------------

  function curves(host) {
    for (const c of data.curves) {
      const figure = host.appendChild(make("figure", { id: c.name.replaceAll("/", "-") }));
      const lines = c.lines.map((line, i) => line && { label: groups[i].label, colour: `--g${i}`, x: line.steps, values: line.mean,
        spread: line.half.some((h) => h !== null) ? line.half.map((h) => h ?? 0) : undefined }).filter(Boolean);
      const many = Math.max(...c.lines.map((line) => line?.n[1] ?? 1)), few = Math.min(...c.lines.map((line) => line?.n[0] ?? many));
      const shade = many > 1 ? ` Shade: 95 % interval over ${few < many ? `${few} to ` : ""}${many} runs.` : "";
      const meaning = c.meaning ? c.meaning[0].toUpperCase() + c.meaning.slice(1) + "." : "";
      Charts.line(figure, { title: c.title, unit: c.unit, caption: meaning + shade, band: c.band ?? undefined, series: lines, height: 210,
        floor: c.floor ?? undefined });
    }
  }

  // --- all runs -----------------------------------------------------------------------------------------------------

  function table() {
    const options = Object.keys(data.differs);
    const head = ["run", ...options, "steps", "before", "after", "KL", "empty", "findings"];
    const rows = runs.map((run, i) => make("tr", {},
      make("td", {}, swatch(run.group), run.report ? make("a", { href: run.report.split("/").map(encodeURIComponent).join("/") }, run.name) : run.name),
      ...options.map((name) => make("td", {}, data.differs[name][i])),
      make("td", { class: "n" }, run.steps[0] === run.steps[1] ? number(run.steps[0]) : `${run.steps[0]} of ${run.steps[1] ?? "?"}`),
      ...[run.before, run.reward, run.kl].map((v) => make("td", { class: "n" }, number(v))),
      make("td", { class: "n" }, share(run.empty)),
      make("td", { class: "finding-names groups" }, ...findingNames(withoutNotes(run.findings).map((f) => ({ ...f, runs: 1 })), 1))));
    const numeric = new Set(["steps", "before", "after", "KL", "empty"]);
    return make("div", { class: "scroll" }, make("table", { class: "all runs" },
      make("thead", {}, make("tr", {}, ...head.map((h) => make("th", { class: numeric.has(h) ? "n" : null }, h)))),
      make("tbody", {}, ...rows)));
  }

  // --- the page -----------------------------------------------------------------------------------------------------

  const section = (id, title, text, ...content) => make("section", { id }, make("h2", {}, title), text ? make("p", {}, text) : null, ...content);
  const chart = make("div"), answers = make("div"), drawn = make("div", { class: "charts" });
  main.replaceChildren(
    make("nav", {}, make("a", { class: "run", href: "#page" }, data.name),
      ...[["frontier", "Reward and KL"], ["replies", "Replies"], ["curves", "Curves"], ["runs", "Runs"]].map(([id, text]) => make("a", { href: `#${id}` }, text))),
    status(),
    make("p", { class: "verdict" }, data.verdict.replaceAll(" ± ", "\u00a0±\u00a0")),
    make("div", { class: "overview compare", id: "frontier" },
      make("div", {}, make("h2", {}, "Reward against KL ", make("span", {}, "up and to the left is better")), chart,
        make("p", { class: "footnote", style: "margin-top:.4rem" }, "Large points: mean of a setting, with 95 % intervals, cut off at the edge of the figure; small points: single runs; dashed line: the settings that no other beats in both reward and KL.")),
      make("div", {}, make("h2", {}, "Settings"), settings())),
    section("replies", "Replies", "The same queries, answered by every setting.", answers),
    section("curves", "Curves", "", drawn),
    section("runs", "All runs", "Each name links to the report of the run.", table()));
  paint();
  frontier(chart);
  replies(answers);
  curves(drawn);
  dark.addEventListener("change", paint);
})();
