// Draws lines over the steps of a run, and the frame of every chart, with uPlot. The only global is `Charts`.
// export.js, where a page has it, adds the buttons that save a chart.
//
//   const chart = Charts.line(element, spec)    draws into `element`; heat.js adds Charts.heat
//   Charts.words(element, spec)                 the same frame around spec.text, for what needs no picture
//   chart.update(spec)                          new data in place; zoom and cursor stay
//   Charts.refresh()                            redraw all charts after the colours have changed
//   Charts.zoom([10, 40]) / Charts.zoom(null)   all charts that share the cursor show these steps / all steps
//   Charts.number(0.5234)                       a number as text, "0.523"
//   Charts.onzoom = (range) => ...              called after a zoom; null: all steps are shown
//
// Every spec:
//   title, unit, caption   texts
//   height                 in pixels
//   group                  charts of one group share cursor and zoom; "steps" by default
//   axis                   name of x; "step" by default
// The spec of a line chart:
//   series    [{label, name, x, values, colour, spread, width, dash, points}]: x ascends; null, from NaN or infinity,
//             leaves a gap; colour is a CSS variable, "--blue"; spread is half the height of the shade around the line;
//             points: dots without a line; name: that of the column in a saved table, the label by default;
//             low, high: the edges of the shade, instead of spread
//   shared    the page has one legend for all charts: the readout names the line under the pointer
//   band      [low, high] shades a healthy range; null leaves a side open
//   target    a dashed line at this value
//   gap       shade where the first of two series, without spread, lies above the second
//   include   values that the y axis must cover; floor: lower values are drawn at this one
//   log       a logarithmic y axis; percent: the values are shares
//   stacked   stacked areas, the first at the bottom; most: the y axis ends there
//   about     (x) => nodes below the plot, about the place under the pointer, or of the newest, x null
//   small     a low chart; whole: the x axis has whole numbers (true by default)
const Charts = (() => {
  const charts = new Set();
  const api = { line, words, refresh, zoom, number, onzoom: null, buttons: () => "" };
  let zoomed = null;
  let theme = {};

  const css = (name) => (theme[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  const element = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  /** Texts are set as text. An attribute that is null or false is left out, one that is true has no value; "on..." is a
      listener, "--..." a style. Children may be nested in lists, and null among them is left out. */
  function fill(made, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (key.startsWith("--")) made.style.setProperty(key, value);
      else made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.flat(Infinity).filter((child) => child !== undefined && child !== null));
    return made;
  }
  const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  function number(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e6)) return value.toExponential(1).replace("e+", "e").replaceAll("-", "−");
    const text = size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
    return text.replace("-", "−");
  }

  function refresh() {
    theme = {};
    for (const chart of charts) chart.repaint();
  }

  function zoom(range) {
    zoomed = range;
    for (const chart of charts) if (chart.group === "steps") chart.show(range);
    api.onzoom?.(range);
  }

  // --- the frame of a chart -----------------------------------------------------------------------------------------

  /** Title, readout, plot and caption; `kind` turns a spec into uPlot's options and data. */
  function chart(host, spec, kind) {
    const self = { group: spec.group ?? "steps", spec, kind, hovered: false, readout: element("output", "readout") };
    self.keys = element("div", "keys");
    self.plot = element("div", "plot");
    self.plot.setAttribute("role", "img");
    self.plot.setAttribute("aria-label", spec.title);
    self.caption = element("span", "", spec.caption || "");
    const caption = element("figcaption");
    caption.append(self.caption, " ", api.buttons(self));
    self.below = spec.about ? element("div", "below") : "";
    host.replaceChildren(header(host, spec, self.readout), self.keys, self.plot, self.below, caption);

    const build = () => {
      self.uplot?.destroy();
      const base = frame(self),
        own = kind.options(self);
      const options = { ...base, ...own, hooks: { ...base.hooks, ...own.hooks } };
      self.uplot = new uPlot(options, kind.data(self), self.plot);
      self.show(self.group === "steps" ? zoomed : null);
      kind.read(self, null);
    };
    self.read = (index) => kind.read(self, index);
    self.full = () => kind.range(self);
    self.show = (range) => {
      const [min, max] = range ?? self.full();
      self.uplot.setScale("x", { min, max });
    };
    self.repaint = () => {
      kind.repaint?.(self);
      self.uplot.redraw(false, true);
    };
    self.update = (next) => {
      const alike = kind.shape(next) === kind.shape(self.spec);
      self.spec = next;
      self.caption.textContent = next.caption || "";
      if (!alike) return build();
      self.uplot.setData(kind.data(self), false);
      self.show(self.group === "steps" ? zoomed : null);
      kind.read(self, null);
    };
    self.remove = () => {
      watcher.disconnect();
      charts.delete(self);
      self.uplot.destroy();
    };
    const watcher = new ResizeObserver(() => {
      const width = Math.floor(self.plot.clientWidth);
      if (width && width !== self.uplot.width) self.uplot.setSize({ width, height: self.uplot.height });
    });
    build();
    charts.add(self);
    watcher.observe(self.plot);
    self.plot.addEventListener("mouseenter", () => (self.hovered = true));
    self.plot.addEventListener("mouseleave", () => (self.hovered = false));
    return self;
  }

  function header(host, spec, readout) {
    host.classList.add("chart");
    host.classList.toggle("small", Boolean(spec.small));
    const head = element("header");
    const title = element("h3", "", spec.title);
    title.append(" ", element("span", "unit", spec.unit || ""));
    head.append(title, readout);
    return head;
  }

  function words(host, spec) {
    const update = (next) => {
      const text = element("p", "words", next.text);
      host.replaceChildren(header(host, next, ""), text, element("figcaption", "", next.caption || ""));
    };
    update(spec);
    return { update, remove: () => {} };
  }

  function frame(self) {
    const { spec } = self;
    return {
      width: Math.max(200, Math.floor(self.plot.clientWidth)),
      height: spec.height ?? (spec.small ? 100 : 190),
      padding: [8, 16, 0, 0],
      legend: { show: false },
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false },
        sync: {
          key: self.group,
          setSeries: false,
          filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
        },
        bind: { dblclick: () => () => (self.group === "steps" ? zoom(null) : self.show(null)) },
        points: { size: 6 },
      },
      hooks: { setCursor: [(u) => self.read(u.cursor.idx ?? null)], setSelect: [(u) => select(self, u)] },
    };
  }

  function select(self, u) {
    const { left, width } = u.select;
    if (width < 6) return;
    const range = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (self.group === "steps") zoom(range);
    else self.show(range);
  }

  const FONT = "11px system-ui, sans-serif";
  const axis = (more) => ({
    stroke: () => css("--soft"),
    font: FONT,
    gap: 4,
    ticks: { show: false },
    grid: { stroke: () => css("--rule"), width: 1 },
    ...more,
  });
  const WHOLE = [1, 2, 5].flatMap((m) => [0, 1, 2, 3, 4, 5, 6].map((p) => m * 10 ** p)).sort((a, b) => a - b);
  const bottom = (spec) =>
    axis({
      size: 22,
      space: 56,
      grid: { show: false },
      ...(spec.whole === false ? {} : { incrs: WHOLE }),
      values: (u, splits) => splits.map((x, i) => (i ? "" : `${spec.axis ?? "step"} `) + x.toLocaleString("en")),
    });

  function put(self, step, text) {
    self.readout.replaceChildren();
    if (step !== null && step !== undefined)
      self.readout.append(element("span", "at", `${self.spec.axis ?? "step"} ${number(step)} `));
    if (text) self.readout.append(element("b", "", text));
  }

  // --- lines --------------------------------------------------------------------------------------------------------

  function line(host, spec) {
    return chart(host, spec, lines);
  }

  const lines = {
    shape: (spec) =>
      JSON.stringify([spec.series.map((s) => [s.label, Boolean(s.spread ?? s.low), s.points]), spec.log, spec.stacked]),

    /** uPlot's columns: x, then for each series its values and, with a spread, the upper and lower edges of the shade. */
    data(self) {
      const { spec } = self;
      const xs = [...new Set(spec.series.flatMap((s) => s.x))].sort((a, b) => a - b);
      const at = new Map(xs.map((x, i) => [x, i]));
      const place = (s, values) => {
        const column = new Array(xs.length).fill(undefined); // the step lacks this metric; unlike null, that leaves no gap
        s.x.forEach((x, i) => (column[at.get(x)] = values[i]));
        return column;
      };
      self.values = spec.series.map((s) => place(s, s.values));
      if (spec.stacked) return [xs, ...stack(self.values)];
      const scaled = (v) => (v === null || v === undefined ? v : scale(spec, v));
      return [
        xs,
        ...spec.series.flatMap((s, n) => {
          return [self.values[n].map(scaled), ...edges(s).map((values) => place(s, values).map(scaled))];
        }),
      ];
    },

    options(self) {
      const { spec } = self;
      const series = [{}],
        bands = [];
      const order = spec.stacked ? [...spec.series].reverse() : spec.series;
      for (const s of order) {
        const colour = () => css(s.colour ?? "--blue");
        series.push({
          label: s.label,
          stroke: spec.stacked ? () => css("--paper") : colour,
          width: s.points ? 0 : spec.stacked ? 1 : (s.width ?? 2),
          dash: s.dash,
          fill: spec.stacked ? colour : undefined,
          points: { show: Boolean(s.points), size: s.points ? 5 : 7, fill: colour, width: 0, filter: lonely },
        });
        if (!(s.spread ?? s.low) || spec.stacked) continue;
        const hidden = { stroke: () => "transparent", width: 0, points: { show: false } };
        series.push({ ...hidden }, { ...hidden });
        bands.push({
          series: [series.length - 2, series.length - 1],
          fill: () => css(`${s.colour ?? "--blue"}-shade`),
        });
      }
      if (spec.gap && spec.series.length > 1) bands.push({ series: [1, 2], fill: () => css("--gap") });
      const y = axis({
        size: 50,
        space: spec.small ? 26 : 32,
        splits: spec.log ? logSplits : undefined,
        values: (u, splits) => splits.map((v) => tick(spec, spec.log ? 10 ** v : round(v))),
      });
      return {
        series,
        bands,
        scales: { x: { time: false }, y: { range: (u, low, high) => vertical(self.spec, low, high) } },
        axes: [bottom(spec), y],
        hooks: { drawClear: [(u) => band(u, spec)], draw: [(u) => target(u, spec)] },
      };
    },

    range(self) {
      const xs = self.uplot.data[0];
      const [min, max] = [xs[0] ?? 0, xs[xs.length - 1] ?? 1];
      return min === max ? [min - 1, max + 1] : [min, max];
    },

    /** The value under the cursor, or the newest. */
    read(self, index) {
      const { spec } = self;
      if (spec.about) self.below.replaceChildren(...spec.about(index === null ? null : self.uplot.data[0][index]));
      if (spec.shared) return name(self, index);
      const known = (v) => v !== null && v !== undefined;
      const newest = (values) => values.findLast(known);
      const last = self.uplot.data[0][Math.max(...self.values.map((values) => values.findLastIndex(known)))];
      const texts = self.values.map((values) => format(spec, index === null ? newest(values) : values[index]));
      const alone = spec.series.length === 1;
      put(self, index === null ? last : self.uplot.data[0][index], alone ? texts[0] : "");
      if (!alone) self.keys.replaceChildren(...spec.series.map((s, n) => key(s, texts[n])));
    },

    /** The columns of a saved table: x, then each series, with its spread. */
    table(self) {
      const { series } = self.spec;
      const at = series.map((s) => new Map(s.x.map((x, i) => [x, i])));
      const names = series.map((s) => s.name ?? s.label);
      return [
        [self.spec.axis ?? "step", ...series.flatMap((s, n) => [names[n], ...shades(s).map((shade) => `${names[n]} ${shade}`)])],
        ...self.uplot.data[0].map((x) => [
          x,
          ...series.flatMap((s, n) => [s.values, ...shades(s).map((shade) => s[shade])].map((column) => column[at[n].get(x)])),
        ]),
      ];
    },

    /** The marks of a saved picture: {tag, attributes}, in pixels of the plot. */
    marks(self) {
      const { spec, uplot } = self, { series } = spec;
      const x = (v) => uplot.valToPos(v, "x").toFixed(1), y = (v) => uplot.valToPos(v, "y").toFixed(1);
      const right = uplot.over.clientWidth, floor = uplot.over.clientHeight;
      const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a)} ${y(b)}`).join("");
      const area = (upper, lower, fill, opacity) =>
        ({ tag: "path", d: `${path([...upper, ...lower.reverse()])}Z`, fill, "fill-opacity": opacity });
      const found = [];
      if (spec.band) {
        const [low, high] = [spec.band[0] ?? -Infinity, spec.band[1] ?? Infinity].map((v, i) =>
          Number.isFinite(v) ? Math.min(floor, Math.max(0, y(scale(spec, v)))) : i ? 0 : floor);
        found.push({ tag: "rect", x: 0, y: high, width: right, height: low - high, fill: css("--green"), "fill-opacity": 0.09 });
      }
      if (spec.stacked) {
        [...series].reverse().forEach((s, n) => {
          const points = uplot.data[0].map((v, i) => [v, uplot.data[n + 1][i]]).filter(([, v]) => v !== null);
          found.push(area(points, points.map(([v]) => [v, 0]), css(s.colour), 1));
        });
        return found;
      }
      const pieces = (s, values) => {  // the stretches between two gaps
        const all = [[]];
        s.x.forEach((v, i) => {
          const at = values[i] === null ? null : scale(spec, values[i]);  // 0 has no place on a logarithmic scale
          if (at === null) all.push([]); else all.at(-1).push([v, at]);
        });
        return all.filter((piece) => piece.length);
      };
      for (const s of series) {
        const [upper, lower] = edges(s).map((values) => pieces(s, values));
        upper?.forEach((piece, i) => found.push(area(piece, lower[i], css(`${s.colour ?? "--blue"}-shade`), 1)));
      }
      for (const s of series)
        for (const piece of pieces(s, s.values)) {
          const colour = css(s.colour ?? "--blue");
          if (s.points || piece.length === 1)
            found.push(...piece.map(([a, b]) => ({ tag: "circle", cx: x(a), cy: y(b), r: 3, fill: colour })));
          else
            found.push({ tag: "path", d: path(piece), fill: "none", stroke: colour, "stroke-width": s.width ?? 2,
              "stroke-dasharray": s.dash?.join(" ") ?? "none" });
        }
      if (typeof spec.target === "number") {
        const at = y(scale(spec, spec.target));
        found.push({ tag: "path", d: `M0 ${at}H${right}`, stroke: css("--soft"), "stroke-dasharray": "4 4" });
      }
      return found;
    },
  };

  /** What the shade of a series is given by: its fields. */
  const shades = (s) => ["spread", "low", "high"].filter((field) => s[field]);

  /** The upper and the lower edge of the shade of a series, if it has one. */
  function edges(s) {
    if (s.low) return [s.high, s.low];
    return s.spread ? [1, -1].map((sign) => s.values.map((v, i) => (v === null || s.spread[i] === null ? null : v + sign * s.spread[i]))) : [];
  }

  /** Name the line that is nearest to the pointer. */
  function name(self, index) {
    const { spec, uplot } = self;
    if (index === null || !self.hovered) return put(self, index === null ? null : uplot.data[0][index], "");
    const y = uplot.posToVal(uplot.cursor.top, "y");
    const away = self.values.map((values) => Math.abs(scale(spec, values[index] ?? NaN) - y));
    const nearest = away.indexOf(Math.min(...away.filter((distance) => !Number.isNaN(distance))));
    const text = nearest < 0 ? "" : `${spec.series[nearest].label}: ${format(spec, self.values[nearest][index])}`;
    put(self, uplot.data[0][index], text);
  }

  const percent = (share) =>
    share && share < 0.001 ? "<0.1 %" : `${number(Number(((share ?? 0) * 100).toPrecision(2)))} %`;
  const format = (spec, value) => (spec.percent && Number.isFinite(value) ? percent(value) : number(value));

  const tick = (spec, value) => (spec.percent ? `${number(round(100 * value))} %` : number(value));

  function key(s, value) {
    const made = element("span", "key");
    const swatch = element("i", s.dash ? "dashed" : "");
    swatch.style.setProperty("--swatch", `var(${s.colour ?? "--blue"})`);
    made.append(swatch, element("span", "", s.label), element("b", "", value));
    return made;
  }

  function stack(columns) {
    const sums = columns[0].map(() => 0);
    const known = columns[0].map((_, i) => columns.some((c) => c[i] !== null && c[i] !== undefined));
    return columns.map((c) => c.map((v, i) => (known[i] ? (sums[i] += v ?? 0) : null))).reverse();
  }

  const scale = (spec, value) =>
    spec.log ? (value > 0 ? Math.log10(value) : null) : Math.max(value, spec.floor ?? -Infinity);
  const round = (value) => Number(value.toPrecision(12));

  /** Points between two gaps, which are drawn as dots because a line needs two points. */
  function lonely(u, index, show) {
    if (show) return null;
    const values = u.data[index];
    const near = (i, by) => {
      for (i += by; values[i] === undefined && i >= 0 && i < values.length; i += by);
      return values[i] ?? null;
    };
    const found = [];
    values.forEach(
      (v, i) => v !== null && v !== undefined && near(i, -1) === null && near(i, 1) === null && found.push(i),
    );
    return found;
  }

  function vertical(spec, low, high) {
    const edges = [low, high, ...(spec.include ?? []).map((v) => scale(spec, v))].filter(
      (v) => v !== null && v !== undefined,
    );
    if (!edges.length) return [0, 1];
    [low, high] = [Math.min(...edges), Math.max(...edges)];
    if (spec.stacked) return [0, Math.min(high, spec.most ?? high) || 1];
    if (low === high && !low) return [0, 1];
    const margin = high > low ? (high - low) * 0.06 : Math.abs(low) * 0.1;
    const fixed = spec.include ?? []; // an edge from `include` gets no margin
    return [fixed.includes(low) ? low : low - margin, fixed.includes(high) ? high : high + margin];
  }

  function logSplits(u, axisIndex, low, high) {
    const [from, to] = [10 ** low, 10 ** high];
    if (high - low < 0.5) {
      const rough = (to - from) / 4;
      const power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
      const ticks = [];
      for (let i = Math.ceil(from / step); i * step <= to; i++) ticks.push(Math.log10(round(i * step)));
      return ticks;
    }
    const every = Math.max(1, Math.ceil((high - low) / 5)),
      ticks = [];
    const within = high - low < 2 ? [1, 2, 5] : [1];
    for (let p = Math.floor(low / every) * every; p <= high; p += every)
      ticks.push(...within.map((m) => p + Math.log10(m)));
    return ticks.filter((t) => t >= low && t <= high);
  }

  function band(u, spec) {
    if (!spec.band) return;
    const { left, top, width, height } = u.bbox;
    const edge = (value, open) =>
      value === null ? open : Math.min(Math.max(u.valToPos(scale(spec, value), "y", true), top), top + height);
    const [low, high] = [edge(spec.band[0], top + height), edge(spec.band[1], top)];
    u.ctx.fillStyle = css("--healthy");
    u.ctx.fillRect(left, high, width, low - high);
  }

  function target(u, spec) {
    if (spec.target === null || spec.target === undefined) return;
    const { left, width } = u.bbox;
    const y = Math.round(u.valToPos(scale(spec, spec.target), "y", true)) + 0.5;
    u.ctx.save();
    u.ctx.strokeStyle = css("--soft");
    u.ctx.lineWidth = devicePixelRatio;
    u.ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    u.ctx.beginPath();
    u.ctx.moveTo(left, y);
    u.ctx.lineTo(left + width, y);
    u.ctx.stroke();
    u.ctx.restore();
  }

  api.parts = { chart, element, make, draw, css, axis, bottom, put, number, percent, round };
  return api;
})();
