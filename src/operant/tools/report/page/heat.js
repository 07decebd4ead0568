// Draws heatmaps over the steps of a run in the frame of charts.js: Charts.heat(element, spec).
//
// The spec of a heatmap has x, the steps of the columns, and either
//     columns: [[first row, share, share, ...], ...] with start, width, rows: row i begins at (start+i)*width, or
//     columns: [[value, ...], ...] with names, one per row, drawn in colours of a logarithmic scale;
//   ramp: the CSS variable with the colours, "--ramp" by default; of: what the shares are of, "replies".
Charts.heat = (() => {
  const { chart, element, css, axis, bottom, put, number, percent, round } = Charts.parts;

  const heats = {
    shape: (spec) => JSON.stringify([spec.names, spec.start, spec.width, spec.rows]),

    data(self) {
      const { spec } = self;
      paint(self);
      return [spec.x, spec.x.map(() => null)];
    },

    repaint: (self) => paint(self),

    options(self) {
      const { spec } = self;
      const rows = spec.names?.length ?? spec.rows;
      const [low, high] = spec.names ? [rows, 0] : [spec.start * spec.width, (spec.start + rows) * spec.width];
      const every = Math.ceil(rows / ((spec.height ?? 190) / 16));
      const named = {
        size: Math.min(120, 14 + 6 * Math.max(...(spec.names ?? []).map((name) => name.length))),
        splits: () => spec.names.map((_, i) => i + 0.5).filter((_, i) => i % every === 0),
        values: (u, splits) => splits.map((v) => spec.names[Math.floor(v)]),
      };
      const counted = { size: 46, space: 32, values: (u, splits) => splits.map((v) => number(round(v))) };
      return {
        series: [{}, { paths: () => null, points: { show: false } }],
        scales: {
          x: { time: false },
          y: { range: () => (spec.names ? [0, rows] : [low, high]), dir: spec.names ? -1 : 1 },
        },
        axes: [bottom(spec), axis({ grid: { show: false }, ...(spec.names ? named : counted) })],
        hooks: { draw: [(u) => drawCells(self, u)] },
      };
    },

    range(self) {
      const edges = borders(self.spec.x);
      return [edges[0], edges[edges.length - 1]];
    },

    read(self, index) {
      const { spec, uplot } = self;
      scaleBar(self);
      if (index === null) return put(self, null, "");
      let text = "";
      if (self.hovered) {
        const row = Math.floor(
          spec.names
            ? uplot.posToVal(uplot.cursor.top, "y")
            : uplot.posToVal(uplot.cursor.top, "y") / spec.width - spec.start,
        );
        const value = cell(spec, spec.columns[index], row);
        const edge = (i) => number(round((spec.start + i) * spec.width));
        text = spec.names
          ? `${spec.names[row] ?? ""} ${number(value)}`
          : `${edge(row)} to ${edge(row + 1)}: ${percent(value)}`;
      }
      put(self, spec.x[index], text);
    },

    table({ spec }) {
      const edge = (i) => round((spec.start + i) * spec.width);
      const rows = spec.names ?? Array.from({ length: spec.rows }, (_, i) => `${edge(i)} to ${edge(i + 1)}`);
      return [
        [spec.axis ?? "step", ...rows],
        ...spec.columns.map((column, i) => [spec.x[i], ...rows.map((_, row) => cell(spec, column, row) ?? (spec.names ? "" : 0))]),
      ];
    },

    /** One path for the cells of each colour. */
    marks(self) {
      const { spec, uplot } = self, paths = new Map();
      const edges = borders(spec.x).map((x) => uplot.valToPos(x, "x").toFixed(1));
      const y = (row) => uplot.valToPos(spec.names ? row : (spec.start + row) * spec.width, "y");
      spec.columns.forEach((column, i) => {
        for (let row = 0; row < (spec.names?.length ?? spec.rows); row++) {
          const value = cell(spec, column, row);
          if (!(value > 0)) continue;
          const [a, b] = [y(row), y(row + 1)].sort((p, q) => p - q).map((v) => v.toFixed(1));
          const fill = `rgb(${self.shade(value).slice(0, 3)})`;
          paths.set(fill, `${paths.get(fill) ?? ""}M${edges[i]} ${a}H${edges[i + 1]}V${b}H${edges[i]}Z`);
        }
      });
      return [...paths].map(([fill, d]) => ({ tag: "path", d, fill, "shape-rendering": "crispEdges" }));
    },
  };

  const cell = (spec, column, row) =>
    spec.names ? column[row] : row >= column[0] ? column[row - column[0] + 1] : undefined;

  /** The left edge of each column and the right edge of the last: half-way between steps, and half a step outside. */
  const borders = (xs) => [xs[0] - 0.5, ...xs.slice(1).map((x, i) => (x + xs[i]) / 2), xs[xs.length - 1] + 0.5];

  /** Paint all cells, one pixel each, in the colours of the present theme. */
  function paint(self) {
    const { spec } = self;
    const rows = spec.names?.length ?? spec.rows,
      colours = ramp(spec.ramp ?? "--ramp");
    const known = spec.columns.flatMap((c) => (spec.names ? c : c.slice(1))).filter((v) => v > 0);
    self.least = known.reduce((a, b) => Math.min(a, b), Infinity);
    const highest = spec.columns.map((c) => Math.max(0, ...(spec.names ? c : c.slice(1)))).sort((a, b) => a - b);
    const last = highest.length - 1; // for shares the 95th percentile, because a single high one would make all others pale
    self.most = highest[spec.names ? last : Math.floor(0.95 * last)];
    const span = Math.log(self.most / self.least) || 1;
    const height = (v) => (spec.names ? 0.06 + (0.94 * Math.log(v / self.least)) / span : Math.sqrt(v / self.most));
    self.shade = (v) => colours[Math.round(Math.min(1, height(v)) * 255)];
    const picture = (self.picture ??= document.createElement("canvas"));
    picture.width = spec.columns.length;
    picture.height = rows;
    const context = picture.getContext("2d"),
      image = context.createImageData(picture.width, rows);
    spec.columns.forEach((column, x) => {
      for (let row = 0; row < rows; row++) {
        const value = cell(spec, column, row);
        if (!(value > 0)) continue;
        const y = spec.names ? row : rows - 1 - row;
        image.data.set(self.shade(value), 4 * (y * picture.width + x));
      }
    });
    context.putImageData(image, 0, 0);
  }

  /** The 256 colours of a ramp. */
  function ramp(name) {
    const stops = css(name)
      .split(/\s+/)
      .map((c) => [1, 3, 5].map((i) => parseInt(c.slice(i, i + 2), 16)));
    return Array.from({ length: 256 }, (_, i) => {
      const at = (i / 255) * (stops.length - 1),
        low = Math.min(Math.floor(at), stops.length - 2);
      return [...stops[low].map((c, k) => Math.round(c + (stops[low + 1][k] - c) * (at - low))), 255];
    });
  }

  function drawCells(self, u) {
    const { picture, spec } = self,
      { left, top, width, height } = u.bbox;
    const edges = borders(spec.x).map((x) => Math.round(u.valToPos(x, "x", true)));
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(left, top, width, height);
    u.ctx.clip();
    u.ctx.imageSmoothingEnabled = false;
    spec.x.forEach((_, i) => {
      if (edges[i + 1] < left || edges[i] > left + width) return;
      u.ctx.drawImage(picture, i, 0, 1, picture.height, edges[i], top, Math.max(1, edges[i + 1] - edges[i]), height);
    });
    u.ctx.restore();
  }

  function scaleBar(self) {
    const { spec } = self,
      bar = element("i", "ramp");
    bar.style.background = `linear-gradient(to right, ${css(spec.ramp ?? "--ramp")
      .split(/\s+/)
      .join(", ")})`;
    const [low, high] = spec.names ? [number(self.least), number(self.most)] : ["0", `${percent(self.most)} of the ${spec.of ?? "replies"} or more`];
    self.keys.replaceChildren(element("span", "", low), bar, element("span", "", high));
  }

  return (host, spec) => chart(host, spec, heats);
})();
