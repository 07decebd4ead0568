// Lays out the page of several runs from the data of compare.py: verdicts, one table, reward against KL and
// perplexity, curves, replies.
// A run keeps its colour, dash and marker in all charts. Texts from a run are set as text, never as HTML.
(() => {
  const data = JSON.parse(document.querySelector("#data").textContent);
  const main = document.querySelector("#page");
  const number = Charts.number;
  const { groups, runs } = data;
  const seeded = groups.some((group) => group.n > 1); // else every group is one run
  const narrow = matchMedia("(max-width: 40rem)"), dark = matchMedia("(prefers-color-scheme: dark)");

  const { make, draw } = Charts.parts;
  const share = (value) => (value === null || value === undefined ? "–" : `${number(100 * value)} %`);
  /** A text that may break after its signs: a path, or the name of a run. */
  const breakable = (text) => text.split(/(?<=[/:_=,-]|\.(?!\d))(?=.{3})/).flatMap((part, i) => (i ? [make("wbr"), part] : [part]));
  const known = (values) => values.filter((value) => value !== null && value !== undefined);

  // --- how a run is drawn -------------------------------------------------------------------------------------------

  // Eight colours whose contrast to the paper is at least 3, and that stay apart with any colour vision; the next eight
  // runs have the same colours with another dash and marker.
  const COLOURS = ["#2277bb", "#889900", "#770066", "#cc7788", "#0044aa", "#776600", "#aa4477", "#444411"];
  const COLOURS_DARK = ["#66aaee", "#eeaa44", "#ee6699", "#00dddd", "#885599", "#aa8800", "#bb3344", "#2277dd"];
  const DASHES = [null, [7, 4], [2, 3], [9, 3, 2, 3]];
  const MARKS = [
    (r) => `M${-r},0a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0`,
    (r) => `M${-0.9 * r},${-0.9 * r}h${1.8 * r}v${1.8 * r}h${-1.8 * r}z`,
    (r) => `M0,${-1.2 * r}l${1.15 * r},${2.1 * r}h${-2.3 * r}z`,
    (r) => `M0,${-1.3 * r}l${1.3 * r},${1.3 * r}l${-1.3 * r},${1.3 * r}l${-1.3 * r},${-1.3 * r}z`,
  ];
  const round = (group) => Math.floor(group / COLOURS.length) % DASHES.length;
  const colour = (group) => ({ "--group": `var(--g${group})` });
  const mark = (group, x, y, r, attributes) =>
    draw("path", { ...colour(group), transform: `translate(${x},${y})`, d: MARKS[round(group)](r), ...attributes });

  let pinned = null, shown = null; // the group that stands out: by a click, and now

  /** Set the colours of all groups; those beside the one that stands out are faint. */
  function paint() {
    groups.forEach((_, i) => {
      const hex = (dark.matches ? COLOURS_DARK : COLOURS)[i % COLOURS.length];
      const [solid, shade] = shown === i ? [1, 0.25] : shown === null ? [1, Math.max(0.05, 0.3 / groups.length)] : [0.13, 0.02];
      const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
      document.documentElement.style.setProperty(`--g${i}`, `rgba(${r}, ${g}, ${b}, ${solid})`);
      document.documentElement.style.setProperty(`--g${i}-shade`, `rgba(${r}, ${g}, ${b}, ${shade})`);
    });
    Charts.refresh();
  }

  function point(group) {
    if (group === shown) return;
    shown = group;
    paint();
  }

  const swatch = (group) => group === null ? make("i", { class: "swatch" })
    : draw("svg", { class: "swatch", width: 30, height: 12, viewBox: "0 0 30 12", "aria-hidden": "true" },
      draw("line", { ...colour(group), x1: 1, x2: 29, y1: 6, y2: 6, "stroke-dasharray": DASHES[round(group)]?.join(" ") }),
      mark(group, 15, 6, 4));

  function legend() {
    const entries = groups.map((group, i) => make("button", {
      type: "button", class: "entry", "aria-pressed": "false",
      onmouseenter: () => point(i), onmouseleave: () => point(pinned), onfocus: () => point(i), onblur: () => point(pinned),
      onclick: () => {
        pinned = pinned === i ? null : i;
        entries.forEach((entry, k) => entry.setAttribute("aria-pressed", String(k === pinned)));
        point(pinned);
      },
    }, swatch(i), make("span", {}, ...breakable(group.name), group.n > 1 ? make("small", {}, ` ${group.n} runs`) : null)));
    const single = make("input", { type: "checkbox", id: "single", onchange: () => update(single.checked) });
    return make("div", { class: "legend" },
      make("div", { class: "entries", role: "group", "aria-label": "Runs; a click makes one stand out" }, ...entries),
      seeded ? make("label", { class: "single" }, single, " single runs") : null);
  }

  // --- the table ----------------------------------------------------------------------------------------------------

  const ACROSS = 6; // more groups are the rows instead of the columns
  const FEW = 3; // more options are folded below the results

  const precise = (half) => number(Number(half.toPrecision(2)));
  const plusMinus = ({ mean, half }) => `${number(mean)}${half === null ? "" : `\u00a0±\u00a0${precise(half)}`}`;
  const signed = ({ mean, half }) => `${mean > 0 ? "+" : ""}${plusMinus({ mean, half })}`;

  /** A number before and after training, with its change. */
  function change(result) {
    if (!result) return ["–"];
    const mean = result.before && number(result.before.mean), after = result.after ? plusMinus(result.after) : "–";
    return [make("span", {}, mean ? `${mean} → ${after}` : after), " ", result.change && make("small", {}, `(${signed(result.change)})`)];
  }

  function findingNames(findings, many) {
    const found = findings.filter((f) => f.level !== "note");
    if (!found.length) return [make("span", { class: "fine" }, "none")];
    return found.flatMap((f, i) => [i ? ", " : "", make("span", { class: f.level, title: f.message },
      f.name.replaceAll("_", " ") + (many > 1 && f.runs < many ? ` (${f.runs} of ${many})` : ""))]);
  }

  const members = (i) => runs.filter((run) => run.group === i);
  const linked = (run) => run.report ? make("a", { href: run.report.split("/").map(encodeURIComponent).join("/") }, ...breakable(run.name)) : make("span", {}, ...breakable(run.name));
  const length = ([made, wanted]) => made === wanted ? number(made) : `${made} of ${wanted ?? "?"}`;
  const distinct = (values) => [...new Set(values)].join(", ");

  /** The fields of a table of groups or runs: [label, row => what is in its cell, whether that is a number]. */
  function fields(rows, more) {
    const where = (row) => row[data.rewards[groups[row.group].reward].held_out ? "held_out" : "training"];
    const after = (name, percent) => (row) => {
      const found = where(row)[name]?.after;
      return [found ? (percent ? share(found.mean) : plusMinus(found)) : "–"];
    };
    const own = data.metrics.filter((name) => rows.some((row) => row.held_out[name]));
    const judged = rows.some((row) => row.held_out.reward), measure = [...new Set(groups.map((group) => group.measure))].join(" or ");
    return [
      ...more,
      judged && [`${measure} on held-out tasks`, (row) => change(row.held_out.reward), true],
      rows.some((row) => row.training.reward) && [`${measure} in training`, (row) => change(row.training.reward), true],
      ["KL per reply, nats", after("kl"), true],
      ...own.map((name) => [`${name}, held out`, (row) => change(row.held_out[name]), true]),
      ["empty replies", after("empty", true), true],
      ["most common word", after("top_word", true), true],
      ["collapsed", (row) => [row.n ? `${row.collapsed} of ${row.n}` : row.collapsed ? "yes" : "no"], false],
      ["seconds", (row) => [number(row.seconds)], true],
      ["findings", (row) => row.steps?.[0] === 0 ? ["–"] : findingNames(row.findings, row.n ?? 1), false],
    ].filter(Boolean);
  }

  /** A table with a row for each run, or a column where there are few; on a phone a block for each. */
  function listing(rows, columns, title) {
    if (rows.length <= ACROSS && !narrow.matches)
      return make("div", { class: "scroll", tabindex: 0 }, make("table", { class: "across" },
        make("thead", {}, make("tr", {}, make("td"), ...rows.map((row) => make("th", { scope: "col" }, ...title(row))))),
        make("tbody", {}, ...columns.map(([label, cell, numeric]) => make("tr", {}, make("th", { scope: "row" }, ...breakable(label)),
          ...rows.map((row) => make("td", { class: numeric ? "n" : null }, ...cell(row))))))));
    return make("div", { class: "scroll", tabindex: 0 }, make("table", { class: "down" },
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "run"),
        ...columns.map(([label, , numeric]) => make("th", { scope: "col", class: numeric ? "n" : null }, ...breakable(label))))),
      make("tbody", {}, ...rows.map((row) => make("tr", {}, make("th", { scope: "row" }, ...title(row)),
        ...columns.map(([label, cell, numeric]) => {
          const made = make("td", { class: numeric ? "n" : "", "data-label": label }, ...cell(row));
          made.classList.toggle("absent", made.textContent.trim() === "–");
          return made;
        }))))));
  }

  const seedsDiffer = new Set(runs.map((run) => run.seed)).size > 1;

  function settings() {
    const rows = groups.map((group, i) => ({ ...group, group: i, steps: members(i)[0].steps }));
    const options = data.options.filter((name) => name !== "steps").map((name) => [name, (row) => breakable(row.values[name] ?? "–"), false]);
    const first = [
      seedsDiffer && ["seeds", ({ group }) => [distinct(known(members(group).map((run) => run.seed))) || "–"], false],
      ["steps", ({ group }) => [distinct(members(group).map((run) => length(run.steps)))], true],
    ];
    const title = ({ group, name }) => [swatch(group), groups[group].n > 1 ? make("span", {}, ...breakable(name)) : linked(members(group)[0])];
    const found = fields(rows, first);
    if (options.length <= FEW) return [listing(rows, [...options, ...found], title)];
    return [listing(rows, found, title), make("details", { class: "options" },
      make("summary", {}, `${options.length} options differ, most of them defaults of the methods`), listing(rows, options, title))];
  }

  function everyRun() {
    const first = [["seed", (row) => [String(row.seed ?? "–")], true], ["steps", (row) => [length(row.steps)], true]];
    return listing(runs, fields(runs, first), (row) => [swatch(row.group), linked(row)]);
  }

  function explanation() {
    const held = data.rewards.map((reward) => reward.held_out);
    const where = held.every(Boolean) ? "on the held-out tasks after training" : held.some(Boolean)
      ? "on the held-out tasks, or in the last steps where a run has none" : "the means of the last 5 steps";
    const spread = seeded ? " ± is half a 95 % interval of Student's t over the seeds." : "";
    return `Options that are equal in all runs are left out. Reward in training: first step → mean of the last 5; KL, empty replies and the share of the most common word: ${where}. A run has collapsed if its held-out score fell by two standard errors or its diagnosis has a problem; seconds are those of its steps, mean of the runs.${spread}`;
  }

  // --- reward against KL and perplexity -----------------------------------------------------------------------------

  const LEFT = 46, RIGHT = 12, TOP = 26, BOTTOM = 42;
  let WIDE = 640, HIGH = 400; // pixels, so that texts keep their size on a phone
  const AXES = {
    kl: {
      title: "KL", unit: "KL, nats per reply (square-root scale)", scale: (x) => Math.sign(x) * Math.sqrt(Math.abs(x)),
      from: 0, to: 1, across: [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000],
    },
    perplexity: {
      title: "perplexity", unit: "perplexity of the replies (logarithmic scale)", scale: (x) => Math.log(Math.max(x, 1)),
      across: [1, 10, 100, 1000, 10000, 100000].flatMap((power) => [power, 2 * power, 5 * power]),
    },
  };

  function ticks(low, high, many) {
    const rough = (high - low) / many || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
    return found;
  }

  function axes(points, { scale, from, to, across }) {
    const xs = points.map((p) => p.x), ys = points.map((p) => p.reward);
    const [least, most] = [Math.min(...xs, from ?? Infinity), Math.max(...xs, to ?? -Infinity)].map(scale);
    const [left, right] = [least - (from === undefined ? 0.06 * (most - least) || 0.5 : 0), most + (0.06 * (most - least) || 0.5)];
    const margin = (Math.max(...ys) - Math.min(...ys)) * 0.1 || Math.abs(ys[0]) * 0.1 || 1;
    const [low, high] = [Math.min(...ys) - margin, Math.max(...ys) + margin];
    return {
      x: (x) => LEFT + ((scale(x) - left) / (right - left || 1)) * (WIDE - LEFT - RIGHT),
      y: (reward) => HIGH - BOTTOM - ((reward - low) / (high - low)) * (HIGH - TOP - BOTTOM),
      across: across.filter((t) => left <= scale(t) && scale(t) <= right),
      up: ticks(low, high, 6),
    };
  }

  /** Reward against KL or perplexity of the runs with one reward. */
  function frontier(host, found, reward, place) {
    const show = () => {
      const width = Math.floor(host.clientWidth) || 640;
      if (width === host.drawn) return;
      host.drawn = WIDE = width;
      HIGH = Math.min(400, Math.max(300, Math.round(width * 0.65)));
      host.replaceChildren(plane(found, reward, place));
    };
    new ResizeObserver(show).observe(host);
    show();
  }

  function plane({ of, points, front, start }, { held_out: held }, place) {
    const { title, unit } = AXES[of], inside = `inside-${of}-${place}`;
    const ends = groups.map((g, i) => ({ name: g.name, n: g.n, reward: g.reward, place: i, final: g[held ? "held_out" : "training"] }))
      .filter((g) => g.reward === place && g.final[of]?.after && g.final.reward?.after)
      .map((g) => ({ ...g, x: g.final[of].after, score: g.final.reward.after }));
    const begin = start === null ? [] : [{ x: start[0], reward: start[1] }];
    const to = axes([...points, ...begin], AXES[of]);
    const mean = (g) => [to.x(g.x.mean), to.y(g.score.mean)];
    const path = front.map((i) => mean(ends.find((g) => g.place === i)).map((v) => v.toFixed(1)).join(",")).join(" ");
    const taken = ends.map(mean).map(([x, y]) => [x - 6, y - 6, x + 6, y + 6]);
    const intervals = ends.flatMap((g) => bars(g, to));
    const crossed = intervals.map((bar) => ["x1", "y2", "x2", "y1"].map((name) => Number(bar.getAttribute(name))));
    return draw("svg", { class: "frontier", width: WIDE, height: HIGH, viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": `Reward against ${title}` },
      draw("clipPath", { id: inside }, draw("rect", { x: LEFT, y: 0, width: WIDE - LEFT, height: HIGH - BOTTOM })),
      ...to.up.flatMap((t) => [draw("line", { class: "rule", x1: LEFT, x2: WIDE - RIGHT, y1: to.y(t), y2: to.y(t) }),
        draw("text", { x: LEFT - 8, y: to.y(t) + 4, "text-anchor": "end" }, number(t))]),
      ...to.across.filter((t, i, all) => !i || to.x(t) - to.x(all[i - 1]) > 32).map((t) => draw("text", { x: to.x(t), y: HIGH - BOTTOM + 18, "text-anchor": "middle" }, number(t))),
      draw("text", { x: WIDE - RIGHT, y: HIGH - 6, "text-anchor": "end" }, unit),
      draw("text", { x: 2, y: 10 }, "reward"),
      front.length > 1 ? draw("polyline", { class: "front", points: path }) : null,
      ...points.filter((p) => groups[p.group].n > 1).map((p) => {
        const made = mark(p.group, to.x(p.x), to.y(p.reward), 3.5, { class: "run" });
        made.append(draw("title", {}, `${p.run}: reward ${number(p.reward)}, ${title} ${number(p.x)}`));
        return made;
      }),
      begin.length ? draw("circle", { class: "start", cx: to.x(start[0]), cy: to.y(start[1]), r: 5 }, draw("title", {}, "before training")) : null,
      draw("g", { "clip-path": `url(#${inside})` }, ...intervals),
      ...ends.map((g) => mark(g.place, ...mean(g), 6.5, { class: "mean", onmouseenter: () => point(g.place), onmouseleave: () => point(pinned) }))
        .map((made, i) => (made.append(draw("title", {}, `${ends[i].name}: reward ${plusMinus(ends[i].score)}, ${title} ${plusMinus(ends[i].x)}`)), made)),
      ...[...ends].sort((a, b) => mean(a)[1] - mean(b)[1]).map((g) => label(g.name, ...mean(g), taken, crossed)),
      begin.length ? label("before training", to.x(start[0]), to.y(start[1]), taken, crossed) : null);
  }

  function bars(g, to) {
    const { x: along, score: reward } = g, line = (x1, y1, x2, y2) => draw("line", { class: "bar", ...colour(g.place), x1, y1, x2, y2 });
    const [x, y] = [to.x(along.mean), to.y(reward.mean)];
    return [
      along.half === null ? null : line(to.x(along.mean - along.half), y, to.x(along.mean + along.half), y),
      reward.half === null ? null : line(x, to.y(reward.mean - reward.half), x, to.y(reward.mean + reward.half)),
    ].filter(Boolean);
  }

  const LONGEST = 30; // characters of a label in the figure; longer names are in the legend only
  const pen = document.createElement("canvas").getContext("2d");
  function wide(text) {
    pen.font = "600 12px system-ui, sans-serif";
    return pen.measureText(text).width + 4;
  }

  /** A label beside its point where it covers nothing, if need be across an interval; null where there is no space. */
  function label(text, x, y, taken, crossed) {
    if (text.length > LONGEST) return null;
    const width = wide(text), tries = [[11, 4], [-11 - width, 4], [11, -10], [11, 18], [-11 - width, -10], [-11 - width, 18], [11, -24], [11, 32]];
    const box = ([dx, dy]) => [x + dx, y + dy - 11, x + dx + width, y + dy + 3];
    const inside = (b) => b[0] >= LEFT && b[2] <= WIDE && b[1] >= 14 && b[3] <= HIGH - BOTTOM;
    const free = (b, boxes) => boxes.every((t) => b[0] > t[2] || b[2] < t[0] || b[1] > t[3] || b[3] < t[1]);
    const fits = (boxes) => tries.find((t) => inside(box(t)) && free(box(t), boxes));
    const best = fits([...taken, ...crossed]) ?? fits(taken);
    if (!best) return null;
    taken.push(box(best));
    return draw("text", { class: "label", x: x + best[0], y: y + best[1] }, text);
  }

  const ROW = 18; // pixels of a line of the legend in a saved picture

  /** The figure as a picture that stands alone: with the styles of this page, its title, and a legend below. */
  function drawing(svg, title, place) {
    const copy = svg.cloneNode(true), parts = [svg, ...svg.querySelectorAll("*")];
    [copy, ...copy.querySelectorAll("*")].forEach((node, i) => {
      const style = getComputedStyle(parts[i]);
      for (const name of LOOKS) node.style.setProperty(name, style.getPropertyValue(name));
    });
    const names = groups.map((group, i) => ({ ...group, i })).filter((group) => group.reward === place);
    const text = (x, y, content) => draw("text", { x, y, style: `font: 12px system-ui, sans-serif; fill: ${Charts.parts.css("--ink")}` }, content);
    const high = HIGH + ROW * (names.length + 2.5), top = -ROW - 4;
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("viewBox", `0 ${top} ${WIDE} ${high}`);
    copy.setAttribute("height", high);
    copy.prepend(draw("rect", { y: top, width: WIDE, height: high, fill: Charts.parts.css("--paper") }));
    copy.append(text(2, -8, title), ...names.flatMap(({ i, name }, k) => {
      const y = HIGH + ROW * (k + 1), sign = mark(i, 12, y - 4, 5);
      sign.style.fill = getComputedStyle(document.documentElement).getPropertyValue(`--g${i}`);
      return [sign, text(26, y, name)];
    }));
    return new XMLSerializer().serializeToString(copy);
  }
  const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font", "paint-order"];

  /** The numbers of the figure: those of the single runs. */
  const numbers = ({ of, points }) => [["run", of, "reward"], ...points.map((p) => [p.run, p.x, p.reward])];

  // --- the replies --------------------------------------------------------------------------------------------------

  const QUERIES_SHOWN = groups.length > ACROSS ? 1 : 3;
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
    if (!queries.length) return host.replaceChildren(make("p", {}, data.replies.queries_differ ? "The runs have no prompts in common." : "No replies have been recorded yet."));
    const last = Math.max(0, Math.ceil(queries.length / QUERIES_SHOWN) - 1) * QUERIES_SHOWN;
    const go = (first) => { chosen.first = Math.max(0, Math.min(first, last)); replies(host); };
    const end = Math.min(chosen.first + QUERIES_SHOWN, queries.length);
    const choose = make("div", { class: "choose" },
      make("button", { type: "button", id: "earlier", onclick: () => go(chosen.first - QUERIES_SHOWN), ...(chosen.first ? {} : { disabled: "" }) }, "‹ earlier"),
      make("span", {}, `${end > chosen.first + 1 ? `prompts ${chosen.first + 1} to` : "prompt"} ${end} of ${queries.length}`),
      make("button", { type: "button", id: "later", onclick: () => go(chosen.first + QUERIES_SHOWN), ...(end < queries.length ? {} : { disabled: "" }) }, "later ›"),
      ...(seeded && seeds.length > 1 ? [make("span", { class: "soft" }, "seed"), ...seeds.map((seed) => make("button", { type: "button", class: "seed",
        "aria-pressed": String(seed === chosen.seed), onclick: () => { chosen.seed = seed; replies(host); } }, String(seed)))] : []));
    const blocks = queries.slice(chosen.first, end).map((query, k) => make("div", { class: "query-block" },
      make("p", { class: "text" }, query),
      reference ? answer(data.replies.reference_label, reference[chosen.first + k], null) : null,
      ...chosenRuns().map(({ group, place }) => answer(groups[group].name, columns[place].answers[chosen.first + k], group))));
    host.replaceChildren(choose, ...blocks);
  }

  // --- curves -------------------------------------------------------------------------------------------------------

  const drawn = [];

  function spec(c, single) {
    const series = c.lines.flatMap(({ group, steps, mean, low, high, runs: each }) => {
      const look = { colour: `--g${group}`, dash: DASHES[round(group)] ?? undefined, x: steps };
      return single && each
        ? each.map((values, k) => ({ ...look, label: members(group)[k].name, values, width: 1.3 }))
        : [{ ...look, label: groups[group].name, values: mean, low, high }];
    });
    const many = c.lines.map((line) => line.n ?? [1, 1]), most = Math.max(...many.map((n) => n[1]));
    const few = Math.min(...many.map((n) => n[0])), count = few < most ? `${few} to ${most}` : most;
    return {
      title: c.of ? `${c.title}: ${c.of}` : c.title, unit: c.unit, band: c.band ?? undefined, floor: c.floor ?? undefined,
      caption: [c.meaning ? `${c.meaning[0].toUpperCase()}${c.meaning.slice(1)}.` : "",
        most > 1 ? (single ? "Every run." : `Mean of ${count} seeds; band: lowest to highest.`) : ""].join(" "),
      series, height: 220, shared: true,
    };
  }

  function curves(host) {
    for (const c of data.curves) {
      const figure = host.appendChild(make("figure", { id: `${c.name}${c.of && ` ${c.of}`}`.replaceAll(/\W+/g, "-") }));
      const values = new Set(c.lines.flatMap((line) => (line.runs ?? [line.mean]).flat()).filter((value) => value !== null));
      if (values.size === 1) Charts.words(figure, { ...spec(c, false), text: `${number([...values][0])} in every step of every run.` });
      else drawn.push([c, Charts.line(figure, spec(c, false))]);
    }
  }

  const update = (single) => drawn.forEach(([c, chart]) => chart.update(spec(c, single)));

  // --- the page -----------------------------------------------------------------------------------------------------

  function status() {
    const seeds = groups.map((g) => g.n), few = Math.min(...seeds), most = Math.max(...seeds);
    const each = few === most ? `${most} seeds each` : `${few} to ${most} seeds each`;
    return make("p", { class: "status" }, make("b", {}, `${runs.length} runs`),
      seeded ? ` in ${groups.length} setting${groups.length > 1 ? "s" : ""}, ${each}` : "");
  }

  const tied = (text) => text.replaceAll(" ± ", "\u00a0±\u00a0");
  const verdict = ({ name, verdict: [first, ...more] }) => make("div", { class: "judgement" },
    name ? make("p", { class: "soft" }, "Reward ", ...breakable(name)) : null,
    make("p", { class: "verdict" }, tied(first)), make("p", {}, tied(more.join(" "))));
  const planes = data.rewards.flatMap((reward, place) => reward.planes.map((found) => ({ host: make("div", { class: "plane" }), found, reward, place })));
  /** A section that folds; on a phone only the first, and the first with charts, are open at first. */
  const section = (id, title, text, ...content) => make("section", { id },
    make("details", ["runs", planes.length ? "frontier" : "curves"].includes(id) || !narrow.matches ? { open: "" } : {}, make("summary", {}, make("h2", {}, title)), make("p", { class: "soft" }, text), ...content));
  const unfold = (id) => main.querySelectorAll(`${id ? `#${id}` : "section"} > details`).forEach((details) => (details.open = true));
  function plot({ host, found, reward, place }) {
    const title = `Reward${reward.held_out ? " on held-out tasks" : " in the last steps"}${reward.name && `: ${reward.name}`}`;
    const whole = `${title} against ${AXES[found.of].title}`;
    const saved = { spec: { title: whole }, drawing: () => drawing(host.firstChild, title, place), table: () => numbers(found) };
    return make("figure", {}, make("h3", {}, found.of === "kl" ? title : whole), host, make("figcaption", {}, Charts.buttons(saved)));
  }
  const answers = make("div"), charts = make("div", { class: "charts compared" }), table = make("div"), all = make("div");
  const links = [["runs", "Runs"], ["frontier", "Reward and KL"], ["curves", "Curves"], ["replies", "Replies"]];
  if (seeded) links.push(["all", "All runs"]);
  const drawTables = () => { table.replaceChildren(...settings()); if (seeded) all.replaceChildren(everyRun()); };

  main.replaceChildren(
    make("nav", {}, make("a", { class: "run", href: "#page" }, data.name), ...links.map(([id, text]) => make("a", { href: `#${id}`, onclick: () => unfold(id) }, text))),
    status(),
    make("div", { class: "judgements" }, ...data.rewards.map(verdict)),
    ...data.notes.map((note) => make("p", { class: "soft" }, note)),
    legend(),
    section("runs", seeded ? "Settings" : "Runs", explanation(), table),
    section("frontier", "Reward against KL", planes.length
      ? `Up and to the left is better; dashed: the runs that no other beats in both.${seeded ? " Large: means over the seeds with 95 % intervals, cut off at the edge; small: single runs." : ""}`
      : "No run has recorded both a reward and a KL.",
      make("div", { class: "planes" }, ...planes.map(plot))),
    section("curves", "Curves", "Point at a line for its name and value; drag to zoom.", charts),
    section("replies", "Replies", "The same prompts, answered by every setting.", answers),
    ...(seeded ? [section("all", "All runs", "Each name links to the report of the run.", all)] : []));
  paint();
  drawTables();
  planes.forEach(({ host, found, reward, place }) => frontier(host, found, reward, place));
  replies(answers);
  curves(charts);
  dark.addEventListener("change", paint);
  narrow.addEventListener("change", drawTables);
  addEventListener("beforeprint", () => unfold());
})();
