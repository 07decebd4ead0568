// Turns the data of a run into the specs of the charts on its page, in order. The only global is `Figures`.
//
//   Figures.SECTIONS      [{id, title, short}, ...]
//   Figures.of(data)      {reward: [spec, ...], distance: [...], ...}, without the figures whose data is absent
//
// A spec is one of Charts with `kind` ("line" or "heat"), `id`, `class`, and `metrics`: the names of those it shows.
const Figures = (() => {
  const number = Charts.number;
  let data; // from run_report.py
  let metrics; // unit, meaning and healthy range of each metric, by name

  // --- curves -------------------------------------------------------------------------------------------------------

  /** {x, values} of a metric; null where it never had a finite value. */
  function curve(name) {
    const found = data.curves.values[name];
    if (!found) return null;
    const [x, values] = Array.isArray(found) ? [data.curves.steps, found] : [found.steps, found.values];
    return values.some((v) => v !== null) ? { x, values } : null;
  }

  function series(name, label, colour, more = {}) {
    const found = curve(name);
    if (!found) return null;
    const spread =
      more.spread === undefined
        ? curve(name.endsWith("/mean") ? name.replace(/mean$/, "std") : `${name}_std`)
        : more.spread;
    const fits = spread && spread.values.length === found.values.length;
    return { label, colour, ...found, ...more, spread: fits ? spread.values : undefined };
  }

  function explained(name) {
    const { meaning = "", healthy = "" } = metrics.get(name) ?? {};
    const sentence = meaning && meaning[0].toUpperCase() + meaning.slice(1) + ".";
    return healthy ? `${sentence} Healthy: ${healthy}.` : sentence;
  }

  /** A line chart of these series, explained by the first metric; null where the run has none of them. */
  function lines(id, title, curves, more = {}) {
    const known = curves.filter((s) => s && !(more.stacked && s.values.every((v) => !v)));
    if (!known.length) return null;
    const names = more.metrics ?? [];
    const { unit = "", band } = metrics.get(names[0]) ?? {};
    return {
      id,
      title,
      unit,
      kind: "line",
      caption: explained(names[0]),
      band: band ?? undefined,
      ...more,
      metrics: names,
      series: known,
    };
  }

  const single = (name, title, more = {}) =>
    lines(name.replaceAll("/", "-"), title, [series(name, title, "--blue", more.of)], { metrics: [name], ...more });

  function heat(name, title, caption, more = {}) {
    const found = data.histograms[name];
    if (!found) return null;
    const { steps, ...grid } = found;
    return { id: `heat-${name}`, title, caption, kind: "heat", x: steps, ...grid, metrics: [], ...more };
  }

  function blocks(kind, title, caption) {
    const found = data.blocks[kind];
    if (!found) return null;
    const height = Math.max(120, Math.min(300, 40 + 18 * found.names.length));
    return {
      id: `blocks-${kind}`,
      class: "wide",
      title,
      caption,
      kind: "heat",
      x: found.steps,
      names: found.names,
      columns: found.columns,
      ramp: "--ramp-size",
      height,
      metrics: [],
    };
  }

  // --- the figures of each section ----------------------------------------------------------------------------------

  const MAKERS = { supervised, reward, distance, update, lengths, gradients, parts, time };
  const SECTIONS = [
    { id: "supervised", title: "Supervised loss", short: "Loss" },
    { id: "reward", title: "Reward", short: "Reward" },
    { id: "distance", title: "Distance from the reference", short: "Distance" },
    { id: "update", title: "Policy update", short: "Update" },
    { id: "lengths", title: "Lengths and text", short: "Text" },
    { id: "gradients", title: "Gradients and weights", short: "Gradients" },
    { id: "parts", title: "Parts of the reward", short: "Parts" },
    { id: "time", title: "Time and memory", short: "Time" },
  ];

  function supervised() {
    return [
      lines(
        "loss",
        "Loss",
        [series("supervised/loss", "training", "--blue"), series("evaluate/loss", "held-out", "--orange")],
        { metrics: ["supervised/loss", "evaluate/loss"], caption: explained("supervised/loss") },
      ),
      single("supervised/bits_per_byte", "Bits per byte of text"),
    ];
  }

  function reward() {
    const scored = curve("evaluate/reward") ? "evaluate/reward" : "probe/reward";
    const { x } = curve(scored) ?? {},
      score = curve("probe/reference_reward")?.values.findLast((v) => v !== null);
    const known = scored === "probe/reward" && x && score !== undefined;
    const reference = known ? { x, values: x.map(() => score) } : null; // the reference answers only once
    const title = scored === "evaluate/reward" ? "Reward on held-out tasks" : "Reward on the fixed probe queries";
    return [
      single("reward/mean", "Reward", {
        caption: `${explained("reward/mean")} Shade: one standard deviation over the replies.`,
      }),
      single("reward/kl_penalty", "KL penalty", { include: [0] }),
      single("reward/return", "Reward after KL penalty"),
      heat(
        "reward",
        "Reward distribution",
        "Each column shows the replies of one step; a stronger colour means that more of them got this reward.",
        { class: "full", metrics: ["reward/std", "reward/min", "reward/max"] },
      ),
      lines("outcomes", "Outcomes", outcomes(), { percent: true, caption: OUTCOMES }),
      lines(
        "held-out",
        title,
        [
          series(scored, "policy", "--blue"),
          reference && { label: "reference", colour: "--orange", ...reference, dash: [5, 4] },
        ],
        { metrics: [scored, "probe/reward", "probe/reference_reward"], band: undefined },
      ),
      ...data.chosen.map((name) => single(name, `${name.slice(9).replaceAll("_", " ")} on held-out tasks`)),
    ];
  }

  const COLOURS = ["--blue", "--orange", "--green", "--pink", "--sky", "--yellow", "--red"];
  const OUTCOMES = "Shares of the replies in each outcome class that the reward names: the seven most frequent at the end.";

  function outcomes() {
    const last = ({ values }) => values.findLast((v) => v !== null);
    return Object.keys(data.curves.values)
      .filter((name) => name.startsWith("outcome/"))
      .map((name) => series(name, name.slice(8), "", { spread: null }))
      .filter(Boolean)
      .sort((a, b) => last(b) - last(a))
      .slice(0, COLOURS.length)
      .map((found, i) => ({ ...found, colour: COLOURS[i] }));
  }

  function distance() {
    const exploited =
      "Both lines are for the policy's own replies. While they stay together, the replies are likely text. If the " +
      "reference's line falls away, the policy earns its reward with text that is unlikely under the reference.";
    const target = data.target === null ? "" : ` Dashed: the target, ${number(data.target)}.`;
    return [
      single("kl/per_reply", "KL per reply", {
        class: "full",
        include: [0, 10],
        target: data.target ?? undefined,
        metrics: ["kl/per_reply", "kl/per_token", "kl/k3", "kl/paid"],
        caption: `${explained("kl/per_reply")} Shade: one standard deviation over the replies.${target}`,
      }),
      heat(
        "kl_per_reply",
        "KL distribution",
        "Each column shows the replies of one step. Read those that are far above the others.",
        { class: "tall", height: 330, unit: "nats", metrics: ["kl/per_reply_std"] },
      ),
      single("kl/coef", "KL coefficient", { class: "full", height: 110, include: [0] }),
      lines(
        "logprobs",
        "Mean log-prob per token",
        [
          series("rollout/logprob_mean", "under the policy", "--blue", { spread: null }),
          series("rollout/ref_logprob_mean", "under the reference", "--orange", { spread: null }),
        ],
        {
          caption: exploited,
          gap: true,
          metrics: ["rollout/logprob_mean", "rollout/ref_logprob_mean"],
          band: undefined,
        },
      ),
      ...logprobs(),
    ];
  }

  /** The two heatmaps side by side. */
  function logprobs() {
    return [
      heat("logprobs", "Token log-probs under the policy", "Distribution of the sampled tokens' log-probs at each step.", {
        unit: "nats",
      }),
      heat(
        "ref_logprobs",
        "The same tokens under the reference",
        "If this heatmap sinks while the left one does not, the policy exploits text that is likely only under itself.",
        { unit: "nats", ramp: "--ramp-reference" },
      ),
    ];
  }

  function update() {
    const floor = (curve("value/explained_variance")?.values.findLast((v) => v !== null) ?? 0) < -1 ? undefined : -1;
    const low = floor !== undefined && curve("value/explained_variance")?.values.some((v) => v < floor);
    return [
      single("policy/entropy", "Entropy", { include: [0] }),
      single("policy/clip_fraction", "Clip fraction", { include: [0] }),
      lines(
        "ratio",
        "Ratio of new to old probability",
        [
          series("policy/ratio_max", "largest", "--orange"),
          series("policy/ratio_mean", "mean", "--blue", { spread: null }),
          series("policy/ratio_min", "smallest", "--green"),
        ],
        {
          log: true,
          band: undefined,
          include: [0.9, 1.1],
          metrics: ["policy/ratio_max", "policy/ratio_min", "policy/ratio_mean", "policy/ratio_std"],
          caption:
            "New over old probability of a token, logarithmic. PPO assumes ratios near 1;" +
            " a largest above 200 or a smallest below 0.005 is a problem.",
        },
      ),
      single("policy/approx_kl", "Size of the update"),
      single("value/explained_variance", "Critic: explained variance", {
        floor,
        include: [0, 1],
        caption: explained("value/explained_variance") + (low ? " Values below −1 are drawn at −1." : ""),
      }),
      single("value/loss", "Critic: loss", { include: [0] }),
    ];
  }

  function lengths() {
    return [
      single("rollout/reply_tokens", "Length of the replies", {
        include: [0],
        caption: `${explained("rollout/reply_tokens")} Shade: one standard deviation.`,
      }),
      heat("reply_tokens", "Length distribution", "Each column shows the replies of one step.", {
        unit: "tokens",
        metrics: ["rollout/reply_tokens_std"],
      }),
      lines(
        "ends",
        "Ends of the replies",
        [
          series("rollout/ended_stop", "stopped", "--blue"),
          series("rollout/ended_length", "at the length limit", "--sky"),
          series("rollout/ended_cut", "cut by a step limit", "--orange"),
        ],
        {
          stacked: true,
          percent: true,
          unit: "",
          band: undefined,
          metrics: ["rollout/ended_stop", "rollout/ended_length", "rollout/ended_cut"],
          caption:
            "Shares of the replies that ended by themselves, at the task's length limit, or because the step limit of " +
            "an environment cut them.",
        },
      ),
      ...[
        ["text/empty", "Empty replies"],
        ["text/top_word", "Most common word"],
        ["text/distinct_1", "Distinct words"],
        ["text/distinct_2", "Distinct word pairs"],
        ["text/repeated", "Repeated trigrams"],
        ["text/exclamations", "Exclamations"],
        ["text/emojis", "Emojis"],
        ["text/non_letters", "Unusual characters"],
      ].map(([name, title]) =>
        single(name, title, {
          small: true,
          percent: true,
          band: undefined,
          unit: "",
          include: [0],
          hint: explained(name),
          caption: "",
        }),
      ),
    ];
  }

  function gradients() {
    return [
      lines(
        "grad-norm",
        "Gradient norm",
        [
          series("update/grad_norm", "before clipping", "--orange"),
          series("update/grad_norm_clipped", "after clipping", "--blue"),
        ],
        { class: "wide", metrics: ["update/grad_norm", "update/grad_norm_clipped", "update/refused"], include: [0] },
      ),
      blocks(
        "gradient",
        "Gradient by block",
        "Gradient norm in each part of the model, first layers on top; colours are logarithmic.",
      ),
      blocks("update", "Weight change by block", "Norm of the change that the update made."),
      blocks("weight", "Weights by block", "Norm of the weights."),
    ];
  }

  function parts() {
    const names = Object.keys(data.curves.values).filter((name) => /^reward\/.+\/mean$/.test(name));
    if (names.length < 2) return [];
    return names.map((name) =>
      single(name, name.slice(7, -5), { of: { spread: curve(name.replace(/mean$/, "std")) } }),
    );
  }

  function time() {
    const phases = [
      ["generate", "--blue"],
      ["reward", "--orange"],
      ["observe", "--green"],
      ["advantage", "--pink"],
      ["update", "--sky"],
      ["evaluate", "--yellow"],
      ["probe", "--red"],
      ["track", "--grey"],
    ];
    return [
      lines(
        "phases",
        "Seconds per step, by phase",
        phases.map(([name, colour]) => series(`time/${name}`, name, colour)),
        {
          stacked: true,
          class: "full tall",
          height: 330,
          unit: "s",
          metrics: ["time/step", ...phases.map(([name]) => `time/${name}`)],
          caption:
            "generate: sampling replies; reward: scoring them; observe: values and reference log-probs; update: the " +
            "optimizer; evaluate and probe: evaluations during training; track: writing the records.",
        },
      ),
      single("tokens/per_second", "Tokens per second", { include: [0], height: 110 }),
      lines(
        "memory",
        "Memory",
        [series("memory/resident_gb", "process", "--blue"), series("memory/gpu_gb", "GPU", "--orange")],
        { unit: "GB", include: [0], height: 110, metrics: ["memory/resident_gb", "memory/gpu_gb"] },
      ),
    ];
  }

  function of(newData) {
    data = newData;
    metrics = new Map(data.metrics.map((m) => [m.name, m]));
    return Object.fromEntries(SECTIONS.map(({ id }) => [id, MAKERS[id]().filter(Boolean)]));
  }

  return { SECTIONS, of };
})();
