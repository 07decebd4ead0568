// Shows how a reward model judges held-out labels: by confidence, by labeller, and where it errs most.
// The only global is `Labels`. Texts from a run are set as text, never as HTML.
const Labels = (() => {
  const { make } = Charts.parts;

  const percent = (share) => `${(100 * share).toFixed(0)} %`;
  const signed = (score) => String(Number(score.toPrecision(2))).replace("-", "−");

  /** A table whose last column is a bar from 0 to 100 %; `mark` is drawn across it. */
  function bars(caption, heads, rows) {
    const bar = (share, mark) => make("td", { class: "bar" }, make("div", { style: `--share: ${100 * share}%; --mark: ${100 * mark}%` }), percent(share));
    return make("table", { class: "shares" }, make("caption", {}, caption),
      make("thead", {}, make("tr", {}, heads.map((head, i) => make("th", i === 1 ? { class: "n" } : {}, head)))),
      make("tbody", {}, rows.map(({ name, of, share, mark }) => make("tr", {}, make("th", {}, name), make("td", { class: "n" }, of.toLocaleString("en")), bar(share, mark)))));
  }

  function disagreement({ labeller, query, better, worse, good, scores }) {
    const side = (name, text, score) => make("div", { class: "side" },
      make("p", { class: "soft" }, `${name}, score `, make("b", {}, signed(score))),
      text.trim() ? make("p", { class: "text" }, text) : make("p", { class: "soft" }, "(empty)"));
    return make("li", {}, make("p", { class: "text query" }, query, make("span", { class: "soft" }, ` ${labeller}`)),
      make("div", { class: "sides" }, worse === null
        ? side(good ? "called good" : "called bad", better, scores[0])
        : [side("preferred", better, scores[0]), side("not preferred", worse, scores[1])]));
  }

  /** Fill `host` from the `labels` of run_report.py. */
  function show(host, { of, calibration, labellers, worst }) {
    host.replaceChildren(...[
      make("div", { class: "tables" },
        bars("How sure it is, and how often it is right", ["confidence", "count", "right"],
          calibration.map((bin) => ({ name: `${(100 * bin.from).toFixed(0)}–${percent(bin.to)}`, of: bin.of, share: bin.right, mark: bin.confidence }))),
        bars("How often it agrees with each labeller", ["labeller", "count", "right"],
          labellers.map((one) => ({ name: one.name, of: one.of, share: one.right / one.of, mark: 0.5 })))),
      make("p", { class: "soft" }, `${of.toLocaleString("en")} judgements. The line is what the confidence promises at the left, and chance at the right. A model that is surer than it is right has learnt too long, or from too few labels.`),
      worst.length ? make("h3", {}, "The worst disagreements") : null,
      worst.length ? make("ol", { class: "disagreements" }, worst.map(disagreement)) : null,
    ].filter(Boolean));
  }

  return { show };
})();
