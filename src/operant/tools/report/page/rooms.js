// Draws the map of a game with the route so far: Rooms.draw(map, places, width). `Rooms.least(map)` is the width that it
// needs. The only global is `Rooms`.
//
//   map: {rooms: {name: [x, y]}, ways: [[a, b, "open" | "closed" | "locked"]]}; places: the rooms visited, in order
const Rooms = (() => {
  const { draw } = Charts.parts;
  const TALL = 68, BOX = 36, LEAST = 80, MOST = 150, PAD = 10, STEP = 5;
  const measure = document.createElement("canvas").getContext("2d");

  /** `text` cut to a width in pixels. */
  function cut(text, width, size) {
    measure.font = `600 ${size}px system-ui, sans-serif`;
    if (measure.measureText(text).width <= width) return text;
    let n = text.length;
    while (n > 1 && measure.measureText(`${text.slice(0, n)}…`).width > width) n -= 1;
    return `${text.slice(0, n)}…`;
  }

  /** A door in the middle of a way: a bar across it, and a square where it is locked. */
  function door([x, y], [u, v], state) {
    const bar = draw("line", { x1: x - 7 * v, y1: y + 7 * u, x2: x + 7 * v, y2: y - 7 * u, stroke: "var(--soft)", "stroke-width": 3 });
    return state === "locked" ? [bar, draw("rect", { x: x - 5, y: y - 5, width: 10, height: 10, rx: 2, fill: "var(--red)" })] : [bar];
  }

  function picture(map, places, width) {
    const rooms = Object.entries(map.rooms);
    const [xs, ys] = [0, 1].map((axis) => [...new Set(rooms.map(([, at]) => at[axis]))].sort((a, b) => a - b));
    const wide = Math.max(LEAST, Math.min(MOST, (width - 2 * PAD) / xs.length)), box = wide - 18, font = wide < 95 ? 11 : 12;
    const centre = new Map(rooms.map(([name, [x, y]]) => [name, [PAD + (xs.indexOf(x) + 0.5) * wide, PAD + (ys.indexOf(y) + 0.5) * TALL]]));
    const size = [2 * PAD + xs.length * wide, 2 * PAD + ys.length * TALL];
    const known = places.filter((name) => centre.has(name)), here = known.at(-1);
    const visits = (name) => known.filter((it, i) => it === name && known[i - 1] !== name).length;
    const ways = map.ways.filter(([a, b]) => centre.has(a) && centre.has(b)).flatMap(([a, b, state]) => {
      const [[x, y], [p, q]] = [centre.get(a), centre.get(b)], length = Math.hypot(p - x, q - y) || 1;
      const line = draw("line", { x1: x, y1: y, x2: p, y2: q, stroke: "var(--grey)", "stroke-width": 2, ...(state === "open" ? {} : { "stroke-dasharray": "4 4" }) });
      return [line, ...(state === "open" ? [] : door([(x + p) / 2, (y + q) / 2], [(p - x) / length, (q - y) / length], state))];
    });
    const boxes = rooms.map(([name]) => {
      const [x, y] = centre.get(name), count = visits(name), current = name === here;
      const text = draw("text", { x, y: y + 4, "text-anchor": "middle", "font-weight": current ? 700 : 400, fill: count ? "var(--ink)" : "var(--soft)" }, cut(name, box - 4, font));
      return draw("g", { class: current ? "here" : "" }, draw("title", {}, count ? `${name}: entered ${count} ${count === 1 ? "time" : "times"}` : `${name}: not visited`),
        draw("rect", { x: x - box / 2, y: y - BOX / 2, width: box, height: BOX, rx: 6, fill: "var(--paper)" }),
        draw("rect", { x: x - box / 2, y: y - BOX / 2, width: box, height: BOX, rx: 6, fill: count ? "var(--blue-shade)" : "var(--sunk)",
          stroke: current ? "var(--blue)" : "var(--rule)", "stroke-width": current ? 3 : 1 }), text);
    });
    return draw("svg", { width: size[0], height: size[1], viewBox: `0 0 ${size.join(" ")}`, role: "img", "font-size": font, "font-family": "system-ui, sans-serif",
      "aria-label": here ? `Map of ${rooms.length} rooms; the player is in ${here}` : `Map of ${rooms.length} rooms` },
      ...ways, ...boxes, ...route(known, centre, box));
  }

  /** Arrows from box to box. Those of the same two rooms lie beside each other; the last one is strongest. */
  function route(known, centre, box) {
    const moves = known.map((name, i) => [known[i - 1], name]).filter(([a, b], i) => i && a !== b);
    const used = new Map();
    return moves.flatMap(([a, b], i) => {
      const [[x, y], [p, q]] = [centre.get(a), centre.get(b)], length = Math.hypot(p - x, q - y) || 1, [u, v] = [(p - x) / length, (q - y) / length];
      const key = `${a}\n${b}`, before = used.get(key) ?? 0;
      used.set(key, before + 1);
      const off = Math.min(STEP * (before + 1), 15); // to the right of the direction of walking
      const edge = Math.min(u ? box / 2 / Math.abs(u) : Infinity, v ? BOX / 2 / Math.abs(v) : Infinity);
      const [from, to] = [[x + u * edge - v * off, y + v * edge + u * off], [p - u * (edge + 5) - v * off, q - v * (edge + 5) + u * off]];
      const last = i === moves.length - 1, colour = { opacity: last ? 1 : 0.55 };
      const turn = (Math.atan2(v, u) * 180) / Math.PI;
      return [draw("line", { x1: from[0], y1: from[1], x2: to[0], y2: to[1], stroke: "var(--blue)", "stroke-width": last ? 3 : 2, ...colour }),
        draw("path", { d: "M-5 -4.5L4 0L-5 4.5z", transform: `translate(${to[0]} ${to[1]}) rotate(${turn})`, fill: "var(--blue)", ...colour })];
    });
  }

  /** The width in pixels that the map needs at least. */
  const least = (map) => 2 * PAD + LEAST * new Set(Object.values(map.rooms).map(([x]) => x)).size;

  return { draw: picture, least };
})();
