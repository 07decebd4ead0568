// Turns the data of a run into the specs of the charts on its page, in order. The only global is `Figures`.
//
//   Figures.SECTIONS      [{id, title, short}, ...]
//   Figures.of(data)      {reward: [spec, ...], distance: [...], ...}, without the figures whose data is absent
//
// A spec is one of Charts with `kind` ("line", "heat" or "words"), `id`, `class`, and `metrics`: those it shows.
// A value that is the same at every step is a sentence.
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
    const start = /^(evaluate|probe)\//.test(name) ? curve(`${name}_before`)?.values[0] : undefined; // before the first step
    const from = (first, values) => (start === undefined || !values ? values : [first, ...values]);
    const all = { x: from(0, found.x), values: from(start, found.values), spread: from(null, fits ? spread.values : undefined) };
    return { label, name, colour, ...all, ...more, spread: all.spread };
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
    const [{ values, spread }] = known;
    if (known.length === 1 && !more.stacked && values.length > 1 && alike(values) && !spread?.some(Boolean)) {
      const value = more.percent ? `${number(values[0] * 100)} %` : number(values[0]);
      const { caption = explained(names[0]), small } = more;
      return { id, title, unit, caption, small, ...more, kind: "words", text: `${value} at every step.`, class: "", metrics: names };
    }
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

  const alike = (values) => values.every((v) => v === values[0]);

  const single = (name, title, more = {}) =>
    lines(name.replaceAll("/", "-"), title, [series(name, title, "--blue", more.of)], { metrics: [name], ...more });

  function heat(name, title, caption, more = {}) {
    const found = data.histograms[name];
    if (!found) return null;
    const { steps, ...grid } = found;
    const base = { id: `heat-${name}`, title, caption, metrics: [], ...more };
    if (steps.length > 1 && found.columns.every((column) => column.length === 2) && alike(found.columns.map((c) => c[0]))) {
      const low = (found.start + found.columns[0][0]) * found.width;
      const narrow = found.width < 1e-9 || (more.whole && found.width === 1); // so narrow a bin is of equal values
      const [from, to] = [low, narrow ? low : low + found.width].map(number);
      const range = from === to ? from : `from ${from} to ${to}`;
      return { ...base, kind: "words", text: `${range}: all ${more.of ?? "replies"} of every step.`, class: "" };
    }
    return { ...base, kind: "heat", x: steps, ...grid };
  }

  function blocks(kind, title, caption) {
    const found = data.blocks[kind];
    if (!found) return null;
    const height = Math.max(120, Math.min(300, 40 + 18 * found.names.length));
    const base = { id: `blocks-${kind}`, title, unit: "norm", caption, class: "wide", height, metrics: [] };
    const values = found.columns.flat();
    if (alike(values)) return { ...base, kind: "words", text: `${number(values[0])} in every part at every step.` };
    return { ...base, kind: "heat", x: found.steps, names: found.names, columns: found.columns, ramp: "--ramp-size" };
  }

  // --- the figures of each section ----------------------------------------------------------------------------------

  const MAKERS = { prompts, games, supervised, reward, "soft-q": softQ, distance, update, lengths, gradients, parts, time };
  const SECTIONS = [
    { id: "prompts", title: "Prompts", short: "Prompts", about: "the best that were written, and what the task model makes of them" },
    { id: "games", title: "Games", short: "Games", about: "how often they are won, how soon, and what is understood" },
    { id: "supervised", title: "Loss", short: "Loss", about: "how well the policy predicts the given replies" },
    { id: "reward", title: "Reward", short: "Reward", about: "what the replies earn, and what is left of it" },
    { id: "soft-q", title: "Soft Q-learning", short: "Soft Q", about: "what the policy takes its tokens and states to be worth" },
    { id: "distance", title: "Distance from the reference", short: "Distance", about: "how far the policy has moved" },
    { id: "update", title: "Update", short: "Update", about: "how much each step changes, and what the critic knows" },
    { id: "lengths", title: "Lengths and text", short: "Text", about: "how long the replies are, and their words" },
    { id: "gradients", title: "Gradients and weights", short: "Gradients", about: "which part of the model changes" },
    { id: "parts", title: "Parts of the reward", short: "Parts", about: "the scores that the reward is made of" },
    { id: "time", title: "Time and memory", short: "Time", about: "where the seconds go" },
  ];

  function prompts() {
    const found = data.prompts?.steps;
    if (!found) return [];
    const { step: x, of, best, mean } = found;
    const so = []; // the place of the best prompt until each step
    best.forEach((score, i) => so.push(score !== null && (i === 0 || so[i - 1] === null || score > best[so[i - 1]]) ? i : (so[i - 1] ?? null)));
    const some = x.length < of ? ` ${number(x.length)} of ${number(of)} steps are drawn.` : "";
    return [
      lines(
        "prompt-scores",
        "Scores of the prompts",
        [
          { label: "best so far", colour: "--blue", x, values: so.map((at) => (at === null ? null : best[at])) },
          { label: "best of the step", colour: "--green", x, values: best, points: true },
          { label: "mean of the step", colour: "--orange", x, values: mean },
        ],
        { metrics: [], unit: "score", height: 240, about: Prompts.below(found, so),
          caption: "Point at a step to read its best prompt. Where a step scores prompts on a few texts, the best of many is flattered by them; " +
            `the accuracies on all texts count. Healthy: the mean rises towards the best.${some}` },
      ),
    ];
  }

  /** Q, V and A = Q - V of the tokens taken, each with that of the copy that the targets come from. */
  function softQ() {
    const pair = (letter, title, caption, more = {}) =>
      lines(
        `soft-${letter}`,
        title,
        [series(`soft_q/${letter}`, "policy", "--blue", { spread: null }), series(`soft_q/target_${letter}`, "its copy", "--orange", { spread: null, dash: [5, 4] })],
        { metrics: [`soft_q/${letter}`, `soft_q/target_${letter}`], caption, ...more },
      );
    const start = curve("soft_q/a")?.values.find((v) => v !== null);
    return [
      pair("q", "Q of the tokens taken", "The logits of the tokens that were taken. Healthy: near the copy's, and levels off; the scores that are trained on set its size."),
      pair("v", "V of the states", "The logsumexp of all logits before each token. Healthy: V of the policy near that of its copy, which follows it slowly. Where they part, the learning rate is too high or the copy too slow."),
      pair("a", "A = Q − V of the tokens taken", "The log-prob of the tokens that were taken, over the whole vocabulary. Healthy: from −log of its size upwards, which is where a uniform policy starts " +
        `(${number(start)} at the first step). At 0 the policy has settled on one prompt; a fall below the start makes its own tokens unlikely.`, { include: [0] }),
    ];
  }

  function games() {
    const held = (name) => series(`evaluate/game/${name}`, "held-out", "--orange", { spread: null });
    const pair = (name, of = "training") => [series(`game/${name}`, of, "--blue", { spread: null }), held(name)];
    const both = (name, title, more) =>
      lines(`game-${name}`, title, pair(name), { metrics: [`game/${name}`, `evaluate/game/${name}`], caption: explained(`game/${name}`), ...more });
    const shares = { percent: true, unit: "share", include: [0, 1], band: undefined };
    return [
      both("won", "Success rate", shares),
      both("score", "Score, of the largest", shares),
      lines(
        "game-turns",
        "Length of the games",
        [...pair("turns", "all games"), series("game/turns_to_win", "won games", "--green", { spread: null })],
        { metrics: ["game/turns", "evaluate/game/turns", "game/turns_to_win", "evaluate/game/turns_to_win"], unit: "turns", include: [0], band: undefined, caption: explained("game/turns") },
      ),
      lines(
        "actions",
        "What the commands are",
        [
          series("actions/valid", "understood", "--blue", { spread: null }),
          series("actions/copied_from_prompt", "copied from the prompt", "--orange", { spread: null }),
          series("actions/empty", "empty", "--pink", { spread: null }),
        ],
        { metrics: ["actions/valid", "actions/copied_from_prompt", "actions/empty"], ...shares,
          caption: "Shares of the policy's commands that the game understood, that are copied from the prompt, and that are empty." },
      ),
      both("optimum_ratio", "Turns of a won game over the fewest", { include: [1], band: undefined }),
      single("game/states_per_1000", "Different states per 1,000 turns", { include: [0] }),
      single("game/examples", "Turns played by the world", { include: [0], percent: true }),
      single("memory/turns_fit", "Earlier turns that the prompt shows", { include: [0] }),
      single("memory/forgotten_tokens", "Tokens of turns that it does not show", { include: [0] }),
    ];
  }

  function supervised() {
    return [
      lines(
        "loss",
        "Loss",
        [series("supervised/loss", "training", "--blue"), series("evaluate/loss", "held-out", "--orange")],
        { metrics: ["supervised/loss", "evaluate/loss"], caption: explained("supervised/loss") },
      ),
      single("supervised/bits_per_byte", "Bits per byte of text"),
      lines(
        "preference-loss",
        "Loss on labelled replies",
        [series("preference/loss", "training", "--blue", { spread: null }), series("evaluate/preference/loss", "held-out", "--orange", { spread: null })],
        { metrics: ["preference/loss"], caption: explained("preference/loss") },
      ),
      lines(
        "preference-accuracy",
        "Pairs in the right order",
        [
          series("preference/accuracy", "training", "--blue", { spread: null }),
          series("evaluate/preference/accuracy", "held-out", "--orange", { spread: null }),
          series("evaluate/preference/longer_is_better", "by length alone", "--green", { spread: null }),
        ],
        { metrics: ["preference/accuracy"], percent: true, include: [0.5, 1], target: 0.5, band: undefined,
          caption: `${explained("preference/accuracy")} Dashed: chance.` },
      ),
      lines(
        "preference-best",
        "The best reply has the highest score",
        [series("preference/best", "training", "--blue", { spread: null }), series("evaluate/preference/best", "held-out", "--orange", { spread: null })],
        { metrics: ["preference/best"], percent: true, include: [0, 1], band: undefined },
      ),
    ];
  }

  function reward() {
    const scored = curve("evaluate/reward") ? "evaluate/reward" : "probe/reward";
    const policy = series(scored, "policy", "--blue"),
      score = curve("probe/reference_reward")?.values.findLast((v) => v !== null);
    const known = scored === "probe/reward" && policy && score !== undefined;
    const reference = known ? { x: policy.x, values: policy.x.map(() => score) } : null; // the reference answers only once
    const title = scored === "evaluate/reward" ? "Reward on held-out tasks" : "Reward on the probe prompts";
    return [
      single("reward/mean", "Reward of the replies", {
        caption: `${explained("reward/mean")} Shade: one standard deviation over the replies.`,
      }),
      paid("reward/kl_penalty", "What KL costs", { include: [0], caption: COST }),
      paid("reward/return", "Reward minus KL penalty", { caption: NET }),
      heat(
        "reward",
        "All rewards of each step",
        "Each column shows the replies of one step; a stronger colour means that more of them got this reward.",
        { class: "full", unit: "score", metrics: ["reward/std", "reward/min", "reward/max"] },
      ),
      lines("outcomes", "What became of the replies", outcomes(), { stacked: true, percent: true, unit: "share", band: undefined, caption: OUTCOMES }),
      lines(
        "held-out",
        title,
        [
          policy,
          reference && { label: "reference", colour: "--orange", ...reference, dash: [5, 4] },
        ],
        {
          metrics: [scored, "probe/reward", "probe/reference_reward"],
          band: undefined,
          ...(scored === "probe/reward" ? { caption: PROBES } : {}),
        },
      ),
      ...chosen().map((name) => single(name, `${name.slice(9).replaceAll("_", " ")} on held-out tasks`)),
      against(),
    ];
  }

  /** The metrics that the run was asked for; those of labelled replies have charts of their own. */
  const chosen = () => data.chosen.filter((name) => !name.startsWith("evaluate/preference/"));

  /** The reward and the other measures of held-out replies over their KL: where they part, the reward is exploited. */
  function against() {
    const kl = curve("evaluate/kl_per_reply");
    const names = ["evaluate/reward", ...chosen()].filter((name) => curve(name)?.values.length === kl?.values.length);
    if (!kl || names.length < 2 || kl.values.length < 3) return null;
    const order = kl.values.map((_, i) => i).sort((a, b) => kl.values[a] - kl.values[b]);
    const drawn = names.slice(0, COLOURS.length).map((name, i) => {
      const { values } = curve(name);
      const first = curve(`${name}_before`)?.values[0] ?? values[0];
      const spread = curve(`${name}_std`)?.values[0] || 1;
      const label = i ? name.slice(9).replaceAll("_", " ") : "the reward";
      const rise = order.map((at) => (values[at] === null ? null : (values[at] - first) / spread));
      return { label, name, colour: COLOURS[i], x: order.map((at) => kl.values[at]), values: rise };
    });
    return lines("against-kl", "The reward and other measures against KL", drawn, {
      axis: "KL", group: "kl", whole: false, unit: "spreads of the first replies",
      band: undefined, include: [0], class: "full", metrics: ["evaluate/reward", "evaluate/kl_per_reply"], caption: AGAINST,
    });
  }

  const AGAINST =
    "How far each has risen since before training, in standard deviations of the first evaluation's scores, over the KL of " +
    "the held-out replies in nats. What training maximises is the reward, a proxy. While another measure rises with it, it is a good one; where the other falls back, the policy " +
    "exploits it: an earlier checkpoint, or a higher price of KL, is better.";
  const PROBES =
    "Mean score of the replies to the same probe prompts, sampled with the same random numbers each time. Dashed: that " +
    "of the reference. Healthy: rises.";
  const COST =
    "The KL penalty: its coefficient times KL, subtracted from the reward of a reply. Healthy: levels off with " +
    "KL. Where it is far above the spread of the rewards, training is mostly about KL.";
  const NET =
    "The mean reward minus the mean KL penalty: what training maximises. Healthy: rises while the reward gains more than " +
    "KL costs, then stays level. It may fall while KL is paid for.";

  /** A metric in units of the reward, where run_report.py could bring it there, else in those of the scaled score. */
  function paid(name, title, { caption, ...more }) {
    const own = `${name}_in_reward_units`;
    if (!data.curves.values[own]) {
      const unit = data.scaled ? metrics.get(name)?.unit : "score";
      return single(name, title, { ...more, unit, caption: data.scaled ? explained(name) : caption });
    }
    const scaled = " In units of the reward; the steps train on scaled scores.";
    return lines(name.replaceAll("/", "-"), title, [series(own, title, "--blue", { spread: curve(`${name}_std_in_reward_units`) })],
      { metrics: [name, `${name}_std`], unit: "score", band: undefined, ...more, caption: caption + scaled });
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
      data.given ? "Both lines are for the given replies, the better and the worse ones together." :
      "Both lines are for the policy's own replies. While they stay together, the replies are likely text. If the " +
      "reference's line falls away, the policy earns its reward with text that is unlikely under the reference.";
    const target = data.target === null ? "" : ` Dashed: the target, ${number(data.target)}.`;
    return [
      data.given ? single("kl/per_reply", "Log-ratio of the given replies", {
        class: "full", include: [0], band: undefined,
        caption: "Sum over a given reply of its log-prob by the policy minus that by the reference, mean over the better and the worse ones. " +
          "It is no KL, which is a mean over the policy's own replies: below 0, the given replies have become less likely.",
      }) : single("kl/per_reply", "KL per reply: how far the policy has moved", {
        class: "full",
        include: [0, 10],
        target: data.target ?? undefined,
        metrics: ["kl/per_reply", "kl/per_token", "kl/k3", "kl/paid"],
        caption: `${explained("kl/per_reply")} Shade: one standard deviation over the replies.${target}`,
      }),
      heat(
        "kl_per_reply",
        data.given ? "Log-ratios of all given replies" : "KL of all replies",
        "Each column shows the replies of one step. Read those that are far above the others.",
        { class: "tall", height: 330, unit: "nats", metrics: ["kl/per_reply_std"] },
      ),
      single("kl/coef", "Price of KL (coefficient)", { include: [0] }),
      lines(
        "logprobs",
        "How likely a token is, on average",
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
      heat("logprobs", "Log-probs of all tokens, by the policy", "Each column shows the tokens of one step.", {
        class: "wide",
        unit: "nats",
        of: "tokens",
      }),
      heat(
        "ref_logprobs",
        "The same tokens, by the reference",
        "If this heatmap sinks while the left one does not, the policy exploits text that is likely only under itself.",
        { class: "wide", unit: "nats", of: "tokens", ramp: "--ramp-reference" },
      ),
    ];
  }

  const CRITIC =
    "Explained variance of the returns. 1: the critic predicts each of them; 0: it only knows their mean; below 0: it is " +
    "worse than that. Healthy: rises towards 1.";

  function update() {
    const floor = (curve("value/explained_variance")?.values.findLast((v) => v !== null) ?? 0) < -1 ? undefined : -1;
    const aged = curve("rollout/staleness")?.values.some(Boolean); // else every reply is of the current policy
    const low = floor !== undefined && curve("value/explained_variance")?.values.some((v) => v < floor);
    return [
      single("policy/entropy", "Indecision (entropy)", { include: [0] }),
      single("policy/clip_fraction", "Clipped tokens", { include: [0], percent: true }),
      lines(
        "ratio",
        "New over old probability",
        [
          series("policy/ratio_max", "largest", "--orange"),
          series("policy/ratio_mean", "mean", "--blue", { spread: null }),
          series("policy/ratio_min", "smallest", "--green"),
        ],
        {
          log: true,
          unit: "ratio",
          band: undefined,
          include: [0.9, 1.1],
          metrics: ["policy/ratio_max", "policy/ratio_min", "policy/ratio_mean", "policy/ratio_std"],
          caption:
            "New over old probability of a token, logarithmic. PPO assumes ratios near 1;" +
            " a largest above 200 or a smallest below 0.005 is a problem.",
        },
      ),
      single("policy/approx_kl", "Size of the update"),
      aged &&
        lines(
          "staleness",
          "Age of the replies",
          [series("rollout/staleness", "mean", "--blue", { spread: null }), series("rollout/staleness_max", "oldest", "--orange")],
          { metrics: ["rollout/staleness", "rollout/staleness_max"], include: [0] },
        ),
      single("rollout/carried", "Replies that an earlier step began", { include: [0, 1], percent: true }),
      single("value/explained_variance", "Accuracy of the critic", {
        unit: "explained variance",
        floor,
        include: [0, 1],
        caption: CRITIC + (low ? " Values below −1 are drawn at −1." : ""),
      }),
      single("value/loss", "Error of the critic", { include: [0], unit: "squared scaled score" }),
    ];
  }

  function lengths() {
    return [
      single("rollout/reply_tokens", "Length of the replies", {
        include: [0],
        caption: `${explained("rollout/reply_tokens")} Shade: one standard deviation.`,
      }),
      heat("reply_tokens", "Lengths of all replies", "Each column shows the replies of one step.", {
        unit: "tokens",
        whole: true,
        metrics: ["rollout/reply_tokens_std"],
      }),
      lines(
        "ends",
        "How the replies end",
        [
          series("rollout/ended_stop", "stopped", "--blue"),
          series("rollout/ended_length", "at the length limit", "--sky"),
          series("rollout/ended_cut", "cut by a step limit", "--orange"),
        ],
        {
          stacked: true,
          percent: true,
          unit: "share",
          band: undefined,
          metrics: ["rollout/ended_stop", "rollout/ended_length", "rollout/ended_cut"],
          caption:
            "Shares of the replies that ended by themselves, at the task's length limit, or because the step limit of " +
            "an environment cut them.",
        },
      ),
      ...[
        ["text/empty", "Empty replies"],
        ["text/top_word", "The most common word"],
        ["text/distinct_1", "Different words"],
        ["text/distinct_2", "Different word pairs"],
        ["text/repeated", "Repeated word triples"],
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
        "Size of the gradient",
        [
          series("update/grad_norm", "before clipping", "--orange"),
          series("update/grad_norm_clipped", "after clipping", "--blue"),
        ],
        { class: "wide", unit: "norm", metrics: ["update/grad_norm", "update/grad_norm_clipped", "update/refused"], include: [0] },
      ),
      blocks(
        "gradient",
        "Gradient in each part of the model",
        "Gradient norm in each part of the model, first layers on top; colours are logarithmic.",
      ),
      blocks("update", "Change of the weights in each part", "How much the update changed them; colours are logarithmic."),
      blocks("weight", "Size of the weights in each part", "The weights themselves; colours are logarithmic."),
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
    const known = phases.map(([name]) => series(`time/${name}`, name, "")).filter(Boolean);
    const total = new Map();
    for (const { x, values } of known) x.forEach((step, i) => total.set(step, (total.get(step) ?? 0) + (values[i] ?? 0)));
    const sorted = [...total.values()].sort((a, b) => a - b), usual = sorted[Math.floor(0.9 * sorted.length)];
    const most = sorted.at(-1) > 5 * usual ? 2 * usual : undefined; // a machine that was paused would flatten the others
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
          most,
          metrics: ["time/step", ...phases.map(([name]) => `time/${name}`)],
          caption:
            "generate: sampling replies; reward: scoring them; observe: values and reference log-probs; update: the " +
            "optimizer; evaluate and probe: evaluations during training; track: writing the records." +
            (most ? ` The longest step, ${number(sorted.at(-1))} s, reaches beyond the picture.` : ""),
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
