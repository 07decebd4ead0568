// Shows the prompts of a run: those found with their baselines, what the task model answers, and their tokens.
// The only global is `Prompts`. Texts from a run are set as text, never as HTML.
//
//   Prompts.show(host, data)          data: from prompts.py
const Prompts = (() => {
  const { element, make, number } = Charts.parts;
  const MARKS = { " ": "·", "\n": "\\n", "\r": "\\r", "\t": "\\t" };
  let chosen = 0; // the row whose answers are shown; stays when new data arrives

  const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
  const count = (n) => n.toLocaleString("en");
  const texts = (n) => `${count(n)} ${n === 1 ? "text" : "texts"}`;

  /** Nodes in which spaces and control characters can be seen. The style sheet draws the marks, so that a selection copies the characters themselves. */
  function visible(text) {
    return text.split(/([\p{Z}\p{C}])/u).filter(Boolean).map((piece) => {
      if (!/^[\p{Z}\p{C}]$/u.test(piece)) return piece;
      const made = element("span", piece === " " ? "mark" : "mark strange", piece);
      made.dataset.mark = MARKS[piece] ?? `U+${piece.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
      return made;
    });
  }

  /** Without a secure connection a page has no clipboard, but may copy what is selected. */
  async function copy(text, button) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.body.appendChild(element("textarea"));
      area.value = text;
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  }

  const copier = (text, about) =>
    make("button", { type: "button", class: "copy", "aria-label": `Copy the template with ${about}`, title: text, onclick: (event) => copy(text, event.currentTarget) }, "Copy");

  // --- the prompts that were found ----------------------------------------------------------------------------------

  function table(found, choose) {
    const { rows, measure, texts: sizes } = found;
    const heads = ["prompt", "from", "calls", `${measure}, training`, "training", sizes.held_out ? "held-out" : "the same texts", ""];
    const cells = (row, i) => {
      const text = row.text ? make("span", { class: "text" }, visible(row.text)) : make("span", { class: "soft" }, "(none)");
      const input = make("input", { type: "radio", name: "prompt", onchange: () => choose(i), ...(i === chosen ? { checked: "" } : {}) });
      const values = [row.from, count(row.calls), number(row.score), percent(row.train), percent(row.test)];
      return make("tr", {}, make("th", { scope: "row" }, row.confusion ? make("label", {}, input, text) : text),
        values.map((value, k) => make("td", { class: k ? "n" : "", "data-label": heads[k + 1] }, value)),
        make("td", {}, row.paste === null ? null : copier(row.paste, `the prompt ${i + 1}, ${row.from}`)));
    };
    const body = (baselines) => make("tbody", {}, rows.map((row, i) => (Boolean(row.baseline) === baselines ? cells(row, i) : null)));
    return make("table", { class: "found" }, make("thead", {}, make("tr", {}, heads.map((head, i) => make("th", { class: i > 1 ? "n" : "" }, head)))), body(false), body(true));
  }

  /** A table of numbers whose cells are the darker, the larger their share is. */
  function matrix(caption, corner, columns, rows) {
    return make("table", { class: "matrix" }, make("caption", {}, caption),
      make("thead", {}, make("tr", {}, make("th", {}, corner), columns.map((name) => make("th", {}, name)))),
      make("tbody", {}, rows.map(({ name, cells }) => make("tr", {}, make("th", {}, name),
        cells.map((cell) => (cell ? make("td", { style: `--share: ${(45 * cell.share).toFixed(1)}%` }, cell.text) : make("td", {}, "–")))))));
  }

  /** The chosen prompt in its template, and for each label what the task model answered. */
  function answers({ words, texts: sizes }, row) {
    const rows = row.confusion.map((counts, label) => {
      const all = counts.reduce((sum, n) => sum + n, 0) || 1;
      return { name: words[label].trim(), cells: counts.map((n) => ({ share: n / all, text: [make("b", {}, count(n)), ` ${percent(n / all, 0)}`] })) };
    });
    const where = sizes.held_out ? `${texts(sizes.test)} that were held out` : texts(sizes.test);
    return make("div", {}, make("h3", {}, "The chosen prompt in its template"),
      make("p", { class: "text paste" }, visible(row.paste)),
      matrix(`Its answers to ${where}`, "label ↓  answer →", words.map((word) => word.trim()), rows));
  }

  function transfer({ transfer: measured, task_model: own, rows }) {
    const models = [...new Set(measured.map((one) => one.task_model))], prompts = [...new Set(measured.map((one) => one.prompt))];
    const at = new Map(measured.map((one) => [JSON.stringify([one.task_model, one.prompt]), one.test]));
    const trained = new Map(rows.filter((row) => !row.baseline).map((row) => [row.text, row.test]));
    const cell = (share) => (share === undefined ? null : { share, text: percent(share) });
    const columns = models.includes(own) ? models : [own, ...models];
    return make("div", { class: "scroll transfer" }, matrix("The prompts with other task models: accuracy on held-out texts", "prompt",
      columns.map((model) => (model === own ? `${model} (trained on)` : model)),
      prompts.map((prompt) => ({
        name: make("span", { class: "text" }, visible(prompt)),
        cells: columns.map((model) => cell(at.get(JSON.stringify([model, prompt])) ?? (model === own ? trained.get(prompt) : undefined))),
      }))));
  }

  // --- the tokens ---------------------------------------------------------------------------------------------------

  function tokens({ first, last, rows }) {
    const most = Math.max(...rows.flatMap(([, ...shares]) => shares));
    const steps = ({ from, to }) => (from === to ? `step ${number(from)}` : `steps ${number(from)} to ${number(to)}`);
    const bar = (share, side) => make("td", { class: side }, make("div", { style: `--share: ${(100 * share) / most}%` }), make("span", {}, percent(share, share < 0.1 ? 1 : 0)));
    return make("table", { class: "tokens" }, make("caption", {}, "Tokens by frequency"),
      make("thead", {}, make("tr", {}, ["token", steps(first), steps(last)].map((head) => make("th", {}, head)))),
      make("tbody", {}, rows.map(([token, early, late]) => make("tr", {}, make("th", {}, make("span", { class: "text" }, visible(token))), bar(early, "early"), bar(late, "late")))),
      make("tfoot", {}, make("tr", {}, make("th", {}, "different ones"), make("td", {}, count(first.different)), make("td", {}, count(last.different)))));
  }

  // --- the section --------------------------------------------------------------------------------------------------

  /** Fill `host`. */
  function show(host, { found, tokens: frequent }) {
    if (found && !found.rows[chosen]?.confusion) chosen = 0;
    const side = make("div", { class: "beside" });
    const left = () => make("div", {}, answers(found, found.rows[chosen]), found.transfer?.length ? transfer(found) : null);
    const fill = () => side.replaceChildren(...[found && left(), frequent && tokens(frequent)].filter(Boolean));
    const choose = (i) => ((chosen = i), fill());
    fill();
    host.replaceChildren(...(found ? [sentence(found), make("div", { class: "scroll" }, table(found, choose))] : []),
      side);
  }

  function sentence({ task_model: model, template, words, set, texts: sizes, calibrate, length, calls }) {
    const error = Math.sqrt(0.25 / sizes.test);
    return make("p", { class: "soft" },
      `Prompts of ${length} token${length === 1 ? "" : "s"}, chosen by their score on ${texts(sizes.train)} of ${set}`,
      sizes.held_out ? ` and measured on ${count(sizes.test)} ${sizes.test === 1 ? "other" : "others"}, where an accuracy is sure to about ± ${percent(error)} (one standard error at 50 %). ` : ". ",
      `${model} reads `, make("code", { class: "option" }, template), ` and answers ${words.map((word) => word.trim()).join(" or ")}`,
      calibrate === "none" ? "" : `, with ${calibrate} calibration`, `. Training called it ${count(calls)} time${calls === 1 ? "" : "s"}, once for each prompt with a text.`);
  }

  /** The lines below a chart of the scores, about the step under the pointer; x: the steps, so: the place of the best so far. */
  function below({ step: x, text, best }, so) {
    const line = (label, i) => {
      const made = element("p", "", `${label} step ${number(x[i])}: `);
      made.append(...visible(text[i]), element("b", "", ` ${number(best[i])}`));
      return made;
    };
    return (step) => {
      const at = step === null ? x.length - 1 : x.indexOf(step);
      if (at < 0 || so[at] === null) return [];
      return [line("Best so far, of", so[at]), ...(step === null || so[at] === at ? [] : [line("Best of", at)])];
    };
  }

  return { show, below };
})();
