// Draws the training cycle of a run from the data of cycle.py: Cycle.draw(figure, cycle). The only global is `Cycle`.
const Cycle = (() => {
  const { element, draw, css, number } = Charts.parts;
  const COLOURS = { generate: "--blue", reward: "--green", observe: "--orange", advantage: "--pink", update: "--blue" };
  const GAP = 22, PAD = 12, LINE = 17, TITLE = 30, LOOP = 26;
  const FONT = "13px system-ui, sans-serif";
  const AGAIN = "the next step begins with the new weights";
  const measure = document.createElement("canvas").getContext("2d");

  function wrapped(text, width) {
    measure.font = FONT;
    return text.split(" ").reduce((lines, word) => {
      const longer = `${lines.at(-1)} ${word}`.trim();
      return measure.measureText(longer).width <= width ? [...lines.slice(0, -1), longer] : [...lines, word];
    }, [""]).filter(Boolean);
  }

  const two = (value) => number(Number(value.toPrecision(2)));
  const shown = (seconds) => (seconds === null ? "" : seconds < 0.01 ? `${two(seconds * 1000)} ms` : `${two(seconds)} s`);

  /** The parts in a row, or below each other where the window is narrow, with an arrow back to the first. */
  function picture({ parts, sentence }, width) {
    const row = width >= 720;
    const wide = row ? (width - GAP * (parts.length - 1)) / parts.length : width - LOOP;
    const texts = parts.map((part) => wrapped(part.text, wide - 2 * PAD));
    const heights = texts.map((lines) => TITLE + lines.length * LINE + PAD);
    const tallest = Math.max(...heights);
    let y = 1;
    const boxes = parts.map((part, i) => {
      const box = row ? { x: i * (wide + GAP), y: 1, height: tallest } : { x: LOOP, y, height: heights[i] };
      y += heights[i] + GAP;
      return box;
    });
    const bottom = row ? tallest + 1 : y - GAP, height = row ? bottom + 40 : bottom + 1;
    const arrow = (x, at, turn) => draw("path", { d: "M-7 -4.5L1 0L-7 4.5z", transform: `translate(${x} ${at}) rotate(${turn})`, fill: "var(--soft)" });
    const line = (d) => draw("path", { d, fill: "none", stroke: "var(--soft)" });
    const nodes = boxes.flatMap((box, i) => {
      const { name, phase, seconds } = parts[i];
      const next = boxes[i + 1], middle = box.x + wide / 2;
      return [
        draw("rect", { x: box.x + 0.5, y: box.y, width: wide - 1, height: box.height - 1, rx: 7, fill: "var(--sunk)", stroke: "var(--rule)" }),
        draw("rect", { x: box.x + PAD, y: box.y, width: 34, height: 3, fill: `var(${COLOURS[phase]})` }),
        draw("text", { x: box.x + PAD, y: box.y + 22, "font-size": 14, "font-weight": 600, fill: "var(--ink)" }, `${i + 1}. ${name}`),
        draw("text", { x: box.x + wide - PAD, y: box.y + 22, "font-size": 12, "text-anchor": "end", fill: "var(--soft)" }, shown(seconds)),
        ...texts[i].map((text, k) => draw("text", { x: box.x + PAD, y: box.y + TITLE + 13 + k * LINE, fill: "var(--ink)" }, text)),
        ...(!next ? [] : row
          ? [line(`M${box.x + wide} ${tallest / 2}H${next.x - 3}`), arrow(next.x - 1, tallest / 2, 0)]
          : [line(`M${middle} ${box.y + box.height}V${next.y - 3}`), arrow(middle, next.y - 1, 90)]),
      ];
    });
    const last = boxes.at(-1), half = (box) => box.y + Math.min(box.height, 40) / 2;
    nodes.push(...(row
      ? [line(`M${last.x + wide / 2} ${bottom}v12H${wide / 2}V${bottom + 3}`), arrow(wide / 2, bottom + 1, -90),
        draw("text", { x: width / 2, y: bottom + 32, "text-anchor": "middle", "font-size": 12, fill: "var(--soft)" }, AGAIN)]
      : [line(`M${LOOP} ${half(last)}H10V${half(boxes[0])}H${LOOP - 3}`), arrow(LOOP - 1, half(boxes[0]), 0)]));
    return draw("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": sentence,
      "font-family": "system-ui, sans-serif", "font-size": 13 }, ...nodes);
  }

  /** The picture with the colours of the present theme instead of variables, on their ground. */
  function alone(svg) {
    const copy = svg.cloneNode(true);
    copy.prepend(draw("rect", { width: "100%", height: "100%", fill: "var(--paper)" }));
    return new XMLSerializer().serializeToString(copy).replace(/var\((--[\w-]+)\)/g, (_, name) => css(name));
  }

  /** Draw, or draw anew, and again whenever the width changes. */
  function show(host, cycle) {
    const known = host.cycle;
    host.cycle = cycle;
    const svg = () => host.querySelector("svg");
    const redraw = () => svg().replaceWith(picture(host.cycle, Math.max(280, Math.floor(host.clientWidth))));
    if (known) return redraw();
    const caption = element("figcaption", "", "One step, with the median seconds of each part. ");
    const table = () => [["part", "seconds", "text"], ...host.cycle.parts.map((p) => [p.name, p.seconds, p.text])];
    caption.append(Charts.buttons({ spec: { id: "training-cycle", title: "Training cycle" }, drawing: () => alone(svg()), table }));
    host.append(draw("svg", {}), caption);
    new ResizeObserver(redraw).observe(host);
  }

  return { show };
})();
