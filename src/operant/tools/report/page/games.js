// Shows games as they were played, two side by side: the map with the route, the turn, and the transcript.
// The only global is `Games`.
//
//   Games.mount(element, data, live, found)    data: from games.py; live: {base: ""} to fetch from the server instead;
//                                              found: called once there are games
//
// Texts from a run are set as text, never as HTML.
const Games = (() => {
  const POLL_INTERVAL = 4000; // milliseconds between two requests of the live page
  const OPTIONS = 8; // options of a choice that are shown, the likeliest first
  const WAYS = ["open", "closed", "locked"];
  let panes = 0; // for unique names

  const { make } = Charts.parts;

  const known = (value) => value !== null && value !== undefined;
  const number = (value) => String(Number(value.toPrecision(3))).replace("-", "−");
  const signed = (value) => (value > 0 ? "+" : "") + number(value);
  const turns = (n) => `${n} ${n === 1 ? "turn" : "turns"}`;
  const length = (game) => game.turns.length + game.further;
  function result(game) {
    const all = turns(length(game));
    if (!known(game.won)) return known(game.reward) ? `reward ${number(game.reward)} in ${all}` : all;
    return game.won ? `won in ${all}` : game.lost ? `lost after ${all}` : `not won in ${all}`;
  }

  // --- sources ------------------------------------------------------------------------------------------------------

  const embedded = (data) => ({ groups: async () => data.groups, games: async (group) => group.games, summary: data.summary });

  function served({ base }) {
    async function request(query) {
      const response = await fetch(`${base}games.json${query}`, { cache: "no-store" });
      const data = await response.json();
      if (!response.ok) throw new Error(data.error);
      return data;
    }
    const games = async (group) => (await request(known(group.step) ? `?step=${group.step}` : `?when=${group.when}`)).games;
    return { live: true, games, groups: async () => (await request("")).groups, summary: "Up to 64 episodes of each step, good and bad ones in turn." };
  }

  // --- one game -----------------------------------------------------------------------------------------------------

  /** Rooms visited up to the `at`-th command; what the player stands in behind the last one is known from some worlds. */
  const placesUntil = (game, at) => [...game.turns.slice(0, at + 1).map((turn) => turn.place), at >= game.turns.length ? game.final?.place : null].filter(known);
  /** The place of the turn that one goes on from; of an episode with branches each turn has it. */
  const before = (game, i) => game.turns[i].parent ?? i - 1;
  /** What was read behind the `at`-th reply: branches have read the same. */
  const answerTo = (game, at) => (game.turns.find((turn, i) => before(game, i) === at - 1) ?? (at === game.turns.length ? game.final : null))?.state;

  /** The turns of an episode in the order of their tree, by their places: how deep each stands, and which branch it is. */
  function tree(game) {
    const after = new Map();
    game.turns.forEach((turn, i) => after.set(before(game, i), [...(after.get(before(game, i)) ?? []), i]));
    const found = new Map();
    const visit = (parent, depth) => (after.get(parent) ?? []).forEach((i, k, all) => {
      const deeper = depth + (all.length > 1);
      found.set(i, { depth: deeper, which: all.length > 1 ? `branch ${k + 1} of ${all.length}` : null });
      visit(i, deeper);
    });
    visit(-1, 0);
    return found;
  }

  function facts(turn) {
    return [
      turn.by && turn.by !== "policy" ? make("b", { class: `by ${turn.by}` }, turn.by) : null,
      turn.valid === true ? null : make("b", { class: "problem" }, "not understood"),
      turn.copied && turn.valid !== true ? make("b", { class: "warning" }, "copied from the prompt") : null,
      turn.reward ? make("span", {}, `reward ${signed(turn.reward)}`) : null,
      known(turn.value) ? make("span", {}, `value ${number(turn.value)}`) : null,
    ];
  }

  /** The options of a choice with their probabilities as bars. */
  function options(turn) {
    if (!turn.options) return null;
    const sorted = turn.options.map(([text, share], i) => [text, share, i]).sort((a, b) => b[1] - a[1]);
    const shown = sorted.filter(([, , i], place) => place < OPTIONS || i === turn.chosen), more = sorted.length - shown.length;
    return make("ul", { class: "options", "aria-label": "Options with their probabilities" },
      shown.map(([text, share, i]) => make("li", { class: i === turn.chosen ? "chosen" : "", style: `--share: ${(100 * (share ?? 0)).toFixed(1)}%` },
        make("span", { class: "text" }, text), make("b", {}, known(share) ? `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %` : "–"))),
      more > 0 ? make("li", { class: "soft" }, `and ${more} less likely`) : null);
  }

  /** A command, who gave it, and what is known of it. The whole reply is shown where it has more than the command. */
  function command(turn) {
    const whole = turn.reply && turn.reply.trim() !== (turn.command ?? "").trim() && !turn.options ? turn.reply : null;
    return [
      make("p", { class: "command" }, make("code", { class: "text" }, turn.command ?? turn.reply ?? "(nothing)"), facts(turn)),
      turn.thought ? make("details", { class: "thought" }, make("summary", {}, "Thought"), make("p", { class: "text" }, turn.thought)) : null,
      whole && whole !== turn.thought ? make("details", { class: "thought" }, make("summary", {}, "Whole reply"), make("p", { class: "text" }, whole)) : null,
    ];
  }

  function legend(map, moved) {
    const states = new Set(map.ways.map(([, , state]) => state));
    return make("p", { class: "legend" }, WAYS.filter((state) => states.has(state)).map((state) => make("span", { class: `way is-${state}` }, state)),
      moved ? make("span", { class: "way is-route" }, "route") : null);
  }

  /** One game that can be stepped through; `show(game)` replaces it. */
  function player(label) {
    let game = null, at = 0, items = [], branches = new Map();
    const stage = make("div", { class: "stage", tabindex: 0, role: "group", "aria-label": `${label} game: the arrow keys step through its turns` });
    const head = make("div", { class: "head" }), map = make("div", { class: "map" }), now = make("div", { class: "now", "aria-live": "polite" });
    const range = make("input", { type: "range", min: 0, step: 1, "aria-label": "Turn", oninput: () => go(Number(range.value)) });
    const button = (text, name, to) => make("button", { type: "button", "aria-label": name, title: name, onclick: () => go(to()) }, text);
    const buttons = [button("|‹", "First turn", () => 0), button("‹", "Turn back", () => at - 1), button("›", "Next turn", () => at + 1), button("›|", "Last turn", () => game.turns.length)];
    const place = make("output", {});
    const log = make("ol", { class: "log" });
    stage.append(map, now);
    stage.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: game.turns.length }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      go(to);
    });
    new ResizeObserver(() => game && drawMap()).observe(map);

    function drawMap() {
      if (!game.map || !map.clientWidth) return;
      const places = placesUntil(game, at);
      stage.classList.toggle("stacked", Rooms.least(game.map) > 0.55 * stage.clientWidth);
      const scroll = make("div", { class: "scroll" }, Rooms.draw(game.map, places, map.clientWidth));
      map.replaceChildren(scroll, legend(game.map, places.length > 1));
      const room = scroll.querySelector(".here rect");
      if (room) scroll.scrollLeft = room.x.baseVal.value + room.width.baseVal.value / 2 - scroll.clientWidth / 2;
    }

    function go(to, quietly) {
      at = Math.max(0, Math.min(game.turns.length, to));
      const turn = game.turns[at - 1], answer = answerTo(game, at), end = at === game.turns.length;
      range.value = at;
      place.textContent = `turn ${at} of ${game.turns.length}`;
      range.setAttribute("aria-valuetext", place.textContent);
      buttons[0].disabled = buttons[1].disabled = at === 0;
      buttons[2].disabled = buttons[3].disabled = end;
      now.replaceChildren(...[make("p", { class: "soft" }, [turn ? `Turn ${at}` : "Start", branches.get(at - 1)?.which].filter(known).join(" · "), placesUntil(game, at).slice(-1).map((name) => ` · ${name}`)),
        ...(turn ? command(turn) : []), answer ? make("p", { class: "text answer" }, answer) : null,
        end && !game.further ? make("p", { class: `result ${game.good ? "fine" : "problem"}` }, result(game)) : null].filter(Boolean));
      drawMap();
      items.forEach((item, i) => (i === at ? item.setAttribute("aria-current", "step") : item.removeAttribute("aria-current")));
      const item = items[at];
      if (!quietly) log.scrollTop = item.offsetTop - log.clientHeight / 3; // the page itself does not move
    }

    function show(chosen) {
      game = chosen;
      const { name, objective, score, most, optimum, further } = game;
      head.replaceChildren(make("p", { class: "result" }, make("b", { class: game.good ? "fine" : "problem" }, result(game)),
          make("span", { class: "soft" }, [known(optimum) ? ` · shortest ${optimum}` : "", known(score) ? ` · score ${number(score)}${known(most) ? ` of ${number(most)}` : ""}` : "", name ? ` · ${name}` : ""].join(""))),
        ...(objective ? [make("p", { class: "objective text" }, objective)] : []));
      branches = tree(game);
      items = [null, ...game.turns].map((turn, i) => {
        const answer = answerTo(game, i), { depth, which } = branches.get(i - 1) ?? {};
        return make("li", { style: depth ? `margin-left: ${Math.min(depth, 8)}rem` : null, onclick: (event) => event.target.closest("summary") || !getSelection().isCollapsed || go(i, true) },
          make("span", { class: "count" }, turn ? String(i) : ""),
          make("div", {}, turn ? [which ? make("p", { class: "soft which" }, which) : null, command(turn), options(turn)] : null, answer ? make("p", { class: "text answer" }, answer) : null));
      });
      log.replaceChildren(items[0], ...[...branches.keys()].map((i) => items[i + 1]), ...(further ? [make("li", {}, make("span"), make("p", { class: "soft" }, `${further} further turns are not shown`))] : []));
      stage.classList.toggle("without-map", !game.map);
      map.hidden = !game.map;
      range.max = game.turns.length;
      go(game.turns.length);
    }

    return { show, host: [head, stage, make("div", { class: "steps" }, buttons, range, place), log] };
  }

  // --- two of them --------------------------------------------------------------------------------------------------

  /** A pane: which group of games, which game, and its player. picks(groups) is what it shows until the user chooses. */
  function pane(label, source, picks) {
    const id = `pane-${++panes}`, screen = player(label);
    let groups = [], games = [], touched = false, number = 0;
    const group = make("select", { "aria-label": `${label}: when`, onchange: () => ((touched = true), open(groups[group.value])) });
    const game = make("select", { "aria-label": `${label}: game`, onchange: () => ((touched = true), screen.show(games[game.value])) });
    const failed = make("p", { class: "missing", hidden: true });
    const host = make("article", { class: "pane", "aria-labelledby": id }, make("h3", { id }, label), make("div", { class: "chooser" }, group, game), failed, screen.host);
    for (const kind of ["click", "keydown"]) screen.host.forEach((part) => part.addEventListener(kind, () => (touched = true))); // read, not chosen

    async function open(chosen, wanted) {
      const request = ++number;
      try {
        const found = await source.games(chosen);
        if (request !== number) return;
        games = found;
        failed.hidden = games.length > 0;
        failed.textContent = "There are no episodes here any more.";
      } catch (error) {
        failed.hidden = false;
        failed.textContent = error.message;
        return;
      }
      game.replaceChildren(...games.map((it, i) => make("option", { value: i }, `${result(it)}${it.name ? `: ${it.name}` : ""}`)));
      const place = Math.max(0, wanted ? games.findIndex(wanted) : 0);
      game.value = place;
      if (games.length) screen.show(games[place]);
    }

    async function update(found) {
      groups = found;
      const chosen = group.selectedOptions[0]?.textContent;
      group.replaceChildren(...groups.map(({ label: name }, i) => make("option", { value: i }, name)));
      if (touched) return void (group.value = groups.findIndex(({ label: name }) => name === chosen));
      const { place, wanted } = picks(groups);
      group.value = place;
      await open(groups[place], wanted);
    }
    return { host, update };
  }

  async function mount(element, data, live, found) {
    const source = live ? served(live) : embedded(data);
    // Early: a game that was not won, of the first group. Late: one that was, of the last; with one group, both of it.
    // An episode that is no game counts as won if it earned more than the mean.
    const early = pane("Early", source, () => ({ place: 0, wanted: (game) => !game.good }));
    const late = pane("Late", source, (groups) => ({ place: groups.length - 1, wanted: (game) => game.good }));
    element.classList.add("plays");
    element.replaceChildren(make("p", { class: "soft" }, source.summary.split("`").map((part, i) => (i % 2 ? make("code", {}, part) : part))),
      make("div", { class: "panes" }, early.host, late.host));
    let shown = "";

    async function refresh() {
      const groups = await source.groups().catch(() => []);
      const labels = groups.map(({ label }) => label).join("\n");
      if (!groups.length || labels === shown) return;
      if (!shown) found();
      shown = labels;
      await Promise.all([early.update(groups), late.update(groups)]);
    }
    await refresh();
    if (live) setInterval(() => document.hidden || refresh(), POLL_INTERVAL);
  }

  return { mount };
})();
