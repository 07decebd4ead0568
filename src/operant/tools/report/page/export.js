// Saves the figures of a page: a picture that stands alone as SVG, and its numbers as CSV. Adds `Charts.buttons`.
//
//   Charts.buttons(chart)     the two buttons of a chart of charts.js
//   Charts.buttons({ spec, drawing: () => "<svg ...", table: () => [[...], ...] })     those of any other figure
Charts.buttons = (() => {
  const { element, css } = Charts.parts;
  const SIZE = 11, TITLE = 14, FAMILY = "system-ui, sans-serif";
  const measure = document.createElement("canvas").getContext("2d");

  const escaped = (text) =>
    String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  const tag = (name, attributes, inner = "") => {
    const written = Object.entries(attributes).map(([key, value]) => ` ${key}="${escaped(value)}"`);
    return `<${name}${written.join("")}>${inner}</${name}>`;
  };
  const text = (x, y, content, more = {}) =>
    tag("text", { x, y, "font-size": SIZE, fill: css("--soft"), ...more }, escaped(content));

  function width(content, font) {
    measure.font = `${font} ${FAMILY}`;
    return measure.measureText(content).width;
  }

  /** What the canvas of a chart shows, drawn again: title, legend, axes with numbers, and the marks of its kind. */
  function picture(self) {
    const { spec, uplot, kind } = self;
    const title = spec.title + (spec.unit ? ` (${spec.unit})` : "");
    const names = spec.shared ? spec.series.map((s) => 50 + width(s.label, `${SIZE}px`)) : [];
    const whole = Math.ceil(Math.max(8 + uplot.width, 16 + width(title, `600 ${TITLE}px`), ...names));
    const [keys, below] = legend(self, whole);
    const [left, top] = [8 + uplot.over.offsetLeft, below + uplot.over.offsetTop], height = below + uplot.height + 8;
    const [wide, high] = [uplot.over.clientWidth, uplot.over.clientHeight];
    const clip = tag("clipPath", { id: "inside" }, tag("rect", { width: wide, height: high }));
    const marks = kind.marks(self).map(({ tag: name, ...attributes }) => tag(name, attributes)).join("");
    return tag("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${whole} ${height}`, width: whole, height,
      "font-family": FAMILY }, [
      tag("rect", { width: whole, height, fill: css("--paper") }),
      text(8, 20, title, { "font-size": TITLE, "font-weight": 600, fill: css("--ink") }),
      keys,
      ...axis(uplot, 1, high).flatMap(([at, label]) => [
        tag("line", { x1: left, x2: left + wide, y1: top + at, y2: top + at, stroke: css("--rule") }),
        text(left - 6, top + at + 4, label, { "text-anchor": "end" })]),
      ...axis(uplot, 0, wide).map(([at, label]) => text(left + at, top + high + 16, label, { "text-anchor": "middle" })),
      tag("g", { transform: `translate(${left} ${top})` }, clip + tag("g", { "clip-path": "url(#inside)" }, marks)),
    ].join(""));
  }

  /** The ticks of an axis as uPlot drew them, 0 for x and 1 for y: [place in pixels, label]. */
  function axis(uplot, which, length) {
    const { _splits: splits, _values: labels } = uplot.axes[which];
    return (splits ?? []).map((split, i) => [uplot.valToPos(split, which ? "y" : "x"), labels[i] ?? ""])
      .filter(([at]) => at > -1 && at < length + 1);
  }

  /** The keys of lines in as many rows as they need, or the scale of a heatmap's colours; and where they end. */
  function legend({ spec, keys }, whole) {
    let x = 8, y = 41;
    if (!spec.series) {
      const [low, , high] = keys.children, colours = css(spec.ramp ?? "--ramp").split(/\s+/);
      const stops = colours.map((colour, i) => tag("stop", { offset: i / (colours.length - 1), "stop-color": colour }));
      const scale = tag("rect", { x: 58, y: y - 7, width: 80, height: 7, fill: "url(#ramp)" });
      const ends = text(52, y, low.textContent, { "text-anchor": "end" }) + text(144, y, high.textContent);
      return [tag("linearGradient", { id: "ramp" }, stops.join("")) + scale + ends, y + 13];
    }
    const labels = spec.shared ? spec.series.map((s) => s.label) // a single line of other charts has none
      : [...keys.children].map((key, i) => `${spec.series[i].label} ${key.lastChild.textContent}`);
    const drawn = labels.map((label, i) => {
      const s = spec.series[i], long = 42 + width(label, `${SIZE}px`);
      if (x > 8 && x + long > whole) [x, y] = [8, y + 17];
      x += long;
      const dash = { "stroke-width": 3, "stroke-dasharray": s.dash?.join(" ") ?? "none" };
      const swatch = tag("path", { d: `M${x - long} ${y - 4}h20`, stroke: css(s.colour ?? "--blue"), ...dash });
      return swatch + text(x - long + 24, y, label);
    });
    return [drawn.join(""), drawn.length ? y + 13 : 30];
  }

  const cell = (value) => (/[",\n]/.test(value ?? "") ? `"${value.replaceAll('"', '""')}"` : String(value ?? ""));
  const csv = (rows) => rows.map((row) => row.map(cell).join(",") + "\n").join("");

  function save(spec, ending, type, content) {
    const link = element("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = `${document.title.split(" · ")[0]}-${spec.id ?? spec.title}`.replace(/[^\w.-]+/g, "-") + `.${ending}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }

  return (self) => {
    const host = element("span", "export");
    const button = (label, what, act) => {
      const made = element("button", "", label);
      made.type = "button";
      made.setAttribute("aria-label", `${self.spec.title}: save ${what} as ${label}`);
      made.onclick = act;
      return made;
    };
    const { drawing = () => picture(self), table = () => self.kind.table(self) } = self;
    host.append(
      button("SVG", "the picture", () => save(self.spec, "svg", "image/svg+xml", drawing())),
      button("CSV", "the numbers", () => save(self.spec, "csv", "text/csv", csv(table()))),
    );
    return host;
  };
})();
