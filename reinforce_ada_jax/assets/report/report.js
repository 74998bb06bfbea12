// The page: its runs, their curves and tables, and on a live page what is new every two seconds.

const EVERY_MS = 2000;
const WINDOWS = [1, 3, 5, 10, 20, 50]; // of smoothing, in iterations
const AXES = { updates: [1, "updates"], tokens: [2, "generated tokens"], seconds: [3, "seconds"] };
// Metrics that are shown first, with a title: [key, title, further keys]. `<name>` is any benchmark.
const FIRST = [
  ["evaluation/<name>/avg", "<name>: accuracy"], ["reward/first_round", "First-round reward"],
  ["collection/zero_signal_share", "Groups without a signal"], ["collection/draws_mean", "Draws for a prompt"],
  ["met_within_two", "Rule met in two rounds"], ["completions/mean_length", "Response length, tokens"],
  ["collection/truncated_share", "Truncated responses"], ["update/entropy", "Entropy, nats a token"],
  ["update/grad_norm", "Gradient norm"], ["update/kl", "KL to the first weights"],
  ["update/approx_kl", "KL of an update"], ["update/clip_fraction", "Clipped tokens"],
  ["update/logprob_gap", "Gap of engine and learner"], ["update/loss", "Loss"],
];
const BANDS = { "collection/draws_mean": ["collection/draws_p10", "collection/draws_p90"] };
const GROUPS = ["evaluation", "reward", "rewards", "update", "collection", "completions", "estimator", "time", "memory", "compile"];

const get = (id) => document.getElementById(id);

// ---- runs -----------------------------------------------------------------------------------------------------------

// A run: `columns` has iteration, updates, tokens, seconds, and values by key, undefined or null where there are none.
class Run {
  constructor(index) {
    this.index = index;
    this.clear();
  }

  clear() {
    this.columns = [[], [], [], []];
    this.metrics = new Map();
  }

  get count() { return this.columns[0].length; }

  take(entry) {
    if (entry.begin === 0) this.clear();
    if (entry.begin !== this.count) return;
    Object.assign(this, { ...entry, keys: undefined, rows: undefined });
    const begin = this.count, places = entry.keys.map((key) => {
      if (!this.metrics.has(key)) this.metrics.set(key, []);
      return this.metrics.get(key);
    });
    entry.rows.forEach((row, offset) => {
      this.columns.forEach((column, index) => column.push(row[index]));
      places.forEach((values, index) => { values[begin + offset] = row[4 + index]; });
    });
    this.derive();
  }

  // The share of prompts whose rule was met within two rounds; an iteration of one round lacks the second key.
  derive() {
    const [met, later, all] = ["met_round_1", "met_round_2", "active_round_1"].map((key) => this.metrics.get("collection/" + key));
    if (!met || !all) return;
    this.metrics.set("met_within_two", met.map((one, index) =>
      all[index] ? Math.max(one ?? 0, (later && later[index]) ?? 0) / all[index] : null));
  }

  // The points of a metric: {x, y, error, band}, without rows that lack it.
  points(key, axis, window) {
    const values = this.metrics.get(key) || [], at = this.columns[AXES[axis][0]], kept = [];
    for (let row = 0; row < values.length; row += 1) {
      if (Number.isFinite(values[row]) && Number.isFinite(at[row])) kept.push(row);
    }
    const pick = (name) => this.metrics.has(name) ? kept.map((row) => this.metrics.get(name)[row] ?? 0) : undefined;
    const raw = kept.map((row) => values[row]), still = key.startsWith("evaluation/") || window === 1;
    const even = (all) => still || !all ? all : smooth(all, window);
    const band = BANDS[key] && BANDS[key].every((name) => this.metrics.has(name)) && BANDS[key].map((name) => even(pick(name)));
    return {
      run: this.index, name: this.name, x: kept.map((row) => at[row]), y: even(raw),
      raw: still || band ? undefined : raw, error: pick(key + "_standard_error"), band: band || undefined,
    };
  }
}

// ---- the page -------------------------------------------------------------------------------------------------------

class Page {
  constructor(data) {
    this.live = data.live;
    this.runs = [];
    this.view = { axis: "updates", log: false, window: 5, hidden: new Set(), emphasis: null };
    this.group = new Group();
    this.charts = new Map(); // by metric
    this.figures = [];
    this.panels = new Map(); // charts of figures, by figure and title
    this.responses = new Responses();
    this.version = -1; // of the tables that a live page has
    this.take(data);
    this.listen();
    this.responses.follow();
    if (this.live) this.ask();
  }

  get names() { return this.runs.map((run) => run.name); }

  take(data) {
    let news = false;
    data.runs.forEach((entry, index) => {
      this.runs[index] ||= new Run(index);
      const again = entry.generation !== undefined && this.runs[index].generation !== entry.generation;
      if (again && this.runs[index].count) this.responses.forget(index);
      news ||= entry.rows.length > 0 || again;
      this.runs[index].take(entry);
    });
    if (data.comparisons) this.comparisons = data.comparisons;
    if (data.figures) this.showFigures(data.figures);
    if (data.responses) this.takeResponses(data);
    const states = this.runs.map((run) => this.state(run)).join();
    if (news || !this.shown) this.show();
    else if (states !== this.states) this.table(); // a run that has stopped says nothing itself
    this.states = states;
    this.shown = true;
    this.status();
  }

  takeResponses({ responses, shown }) {
    const before = this.responses.pools.size;
    this.responses.add(responses, this.names);
    if (shown) get("shown").replaceChildren(...shown.map((line) => element("p", "note", line)));
    if (!before) this.responses.refresh();
    else if (responses.rows.length) this.responses.offer();
  }

  show() {
    get("names").replaceChildren(...this.names.flatMap((name, index) => [index ? ", " : "", element("bdi", "", name)]));
    this.chips();
    this.table();
    this.compare();
    this.curves();
    this.configuration();
  }

  // ---- progress ---------------------------------------------------------------------------------------------------

  state(run) {
    const last = run.columns[0].at(-1) ?? 0, total = run.iterations;
    if (run.problem) return run.problem;
    if (total && last >= total) return "finished";
    if (!this.live) return total ? `${many(last)} of ${many(total)} iterations` : "";
    if (!last) return "waits for the first iteration";
    const each = run.left && total ? run.left / (total - last) : 60;
    if (run.age > Math.max(120, 5 * each)) return `no new iteration for ${duration(run.age)}`;
    return run.left ? `running, about ${duration(run.left)} left` : "running";
  }

  status() {
    const parts = this.runs.map((run) => {
      const last = run.columns[0].at(-1) ?? 0, made = element("span", "run"), device = run.started && run.started.device;
      if (this.runs.length > 1) made.append(swatch(run.index));
      made.append(element("b", "", run.iterations ? `${many(last)} / ${many(run.iterations)}` : many(last)),
        ` ${this.state(run)}`, this.runs.length === 1 && device ? ` · ${device}` : "");
      return made;
    });
    const lost = this.lost ? [element("span", "lost", `no contact since ${this.lost.toLocaleTimeString()}`)] : [];
    get("status").replaceChildren(...lost, ...parts);
    const [run] = this.runs, last = run ? run.columns[0].at(-1) ?? 0 : 0;
    document.title = (this.live && run && run.iterations ? `${last}/${run.iterations} ` : "") + this.names.join(", ") + " – reinforce_ada_jax";
  }

  // ---- tables -----------------------------------------------------------------------------------------------------

  // A table without columns that are empty in all its lines; cells are text, nodes, or [text, class].
  fill(table, header, lines, className) {
    const used = header.map((_, index) => lines.some((line) => line[index] !== "" && line[index] !== undefined));
    const row = (cells, name) => {
      const made = element("tr");
      cells.forEach((cell, index) => {
        if (!used[index]) return;
        const first = index === 0 || name === "th", [content, cls] = Array.isArray(cell) ? cell : [cell, ""];
        const place = element(first ? "th" : "td", cls);
        if (first) place.scope = name === "th" ? "col" : "row";
        place.append(content);
        made.append(place);
      });
      return made;
    };
    const head = element("thead"), body = element("tbody");
    head.append(row(header, "th"));
    body.append(...lines.map((line) => row(line, "td")));
    table.className = className;
    table.replaceChildren(head, body);
    return table;
  }

  named(index) {
    const made = element("span", "named-run");
    made.append(swatch(index), element("bdi", "", this.names[index]));
    return made;
  }

  table() {
    const lines = this.runs.map((run) => {
      const last = run.count - 1, started = run.started || {}, at = (column) => Number.isFinite(run.columns[column][last]) ? many(Math.round(run.columns[column][last])) : "";
      const date = started.date ? String(started.date).slice(0, 16).replace("T", " ") : "";
      const time = last >= 0 && run.columns[3][last] ? duration(run.columns[3][last]) : "";
      return [this.named(run.index), at(1), at(2), time, this.state(run), String(started.device ?? ""),
        String(started.commit ?? ""), date, element("code", "", run.workdir)];
    });
    const header = ["run", "updates", "tokens", "time", "state", "device", "commit", "started, UTC", "folder"];
    get("runs-table").replaceChildren(this.fill(element("table"), header, lines, "facts-table"));
  }

  compare() {
    const made = (this.comparisons || []).map((found) => {
      const box = element("div"), wide = element("div", "wide");
      const every = Math.max(1, Math.ceil((found.updates.length - 1) / 6));
      const moments = found.updates.filter((_, index) => (found.updates.length - 1 - index) % every === 0 || index === 0);
      // The highest, as it is shown; none if all are equal.
      const best = moments.map((at) => {
        const shown = found.runs.filter((run) => run.averages[at]).map((run) => Number(run.averages[at][0].toFixed(3)));
        return new Set(shown).size > 1 ? Math.max(...shown) : null;
      });
      const lines = found.runs.map((run) => [
        this.named(this.names.indexOf(run.name)),
        ...moments.map((at, index) => this.average(run.averages[at], best[index])), ...run.costs,
      ]);
      const header = [found.title, ...moments.map((at) => `${many(at)} updates`), ...found.cost_names];
      wide.append(this.fill(element("table"), header, lines, "numbers"));
      box.append(wide);
      if (found.sentence) box.append(element("p", "", found.sentence));
      return box;
    });
    const none = element("p", "note", "No run was evaluated after an iteration.");
    get("comparisons").replaceChildren(...(made.length ? made : [none]));
    const waiting = this.runs.filter((run) => run.log && !run.columns[0].at(-1));
    get("logs").replaceChildren(...waiting.flatMap((run) => [element("h3", "", `Log of ${run.name}`), element("pre", "", run.log)]));
  }

  average(pair, best) {
    if (!pair) return "";
    const made = element("span", "average"), text = pair[0].toFixed(3);
    made.append(element(Number(text) === best ? "strong" : "span", "", text));
    if (pair[1] !== null) made.append(element("small", "", ` ± ${pair[1].toFixed(3)}`));
    return made;
  }

  configuration() {
    const keys = [...new Set(this.runs.flatMap((run) => Object.keys(run.config || {})))].sort();
    const line = (key) => [element("code", "", key), ...this.runs.map((run) => element("code", "", run.config?.[key] ?? "absent"))];
    const differs = (key) => new Set(this.runs.map((run) => run.config?.[key])).size > 1;
    const header = ["key", ...this.names], different = keys.filter(differs), same = keys.filter((key) => !differs(key));
    const wide = (found) => {
      const made = element("div", "wide");
      made.append(this.fill(element("table"), header, found.map(line), "configuration"));
      return made;
    };
    const text = different.length ? "Where the runs differ" : "The runs have one configuration";
    const narrow = innerWidth <= 600 && different.length > 0; // a phone opens them
    const box = element(narrow ? "details" : "div");
    box.append(...(this.runs.length > 1 ? [element(narrow ? "summary" : "h3", "", text)] : []), ...(different.length ? [wide(different)] : []));
    get("different").replaceChildren(box);
    const summary = element("summary", "", `${different.length ? "The other keys" : "All keys"} (${same.length})`);
    get("same").replaceChildren(summary, wide(same));
  }

  // ---- curves -----------------------------------------------------------------------------------------------------

  chips() {
    const made = this.runs.map((run) => {
      const chip = element("button", "chip");
      chip.type = "button";
      chip.dataset.run = run.index;
      chip.setAttribute("aria-pressed", String(!this.view.hidden.has(run.index)));
      chip.append(swatch(run.index), element("bdi", "", run.name));
      return chip;
    });
    get("runs").replaceChildren(...made);
    get("runs").hidden = this.runs.length < 2;
  }

  // Keys in order, and those that never change, with their value.
  metrics() {
    const keys = [...new Set(this.runs.flatMap((run) => [...run.metrics.keys()]))], moving = [], constant = [];
    for (const key of keys) {
      if (key.endsWith("_standard_error")) continue;
      let first, count = 0, same = true;
      for (const run of this.runs) {
        for (const value of run.metrics.get(key) || []) {
          if (!Number.isFinite(value)) continue;
          if (count === 0) first = value;
          same &&= value === first;
          count += 1;
        }
      }
      if (count && same && count > 2) constant.push([key, first]); else if (count) moving.push(key);
    }
    return { moving, constant };
  }

  first(moving) {
    return FIRST.flatMap(([key, title]) => {
      if (!key.includes("<name>")) return moving.includes(key) ? [[key, title]] : [];
      const [before, after] = key.split("<name>");
      return moving.filter((one) => one.startsWith(before) && one.endsWith(after))
        .map((one) => [one, title.replace("<name>", () => one.slice(before.length, -after.length))]);
    });
  }

  curves() {
    const { moving, constant } = this.metrics(), first = this.first(moving), titles = new Map(first);
    this.titles = titles;
    this.place(get("overview"), first.map(([key]) => key));
    const others = moving.filter((key) => !titles.has(key) && key !== "met_within_two").sort();
    const names = [...new Set(others.map((key) => key.split("/")[0]))];
    const rank = (name) => (GROUPS.indexOf(name) + GROUPS.length + 1) % (GROUPS.length + 1);
    const groups = get("groups");
    for (const name of names.sort((a, b) => rank(a) - rank(b))) {
      let box = [...groups.children].find((one) => one.dataset.name === name);
      if (!box) {
        box = element("details", "group");
        box.open = innerWidth > 600; // on a phone 50 charts are 10,000 pixels
        box.dataset.name = name;
        box.append(element("summary", "", name), element("div", "grid"));
        groups.append(box);
      }
      this.place(box.lastElementChild, others.filter((key) => key.split("/")[0] === name));
    }
    const table = get("constant").querySelector("table");
    this.fill(table, ["metric", "value"], constant.map(([key, value]) => [element("code", "", key), short(value, 6)]), "numbers");
    get("constant").hidden = !constant.length;
    get("constant").firstElementChild.textContent = `Metrics that never change (${constant.length})`;
    this.draw();
    this.find();
  }

  // Puts the charts of these metrics into a grid, and moves none that is there already.
  place(grid, keys) {
    const boxes = keys.map((key) => {
      if (!this.charts.has(key)) this.charts.set(key, this.group.add());
      const { box } = this.charts.get(key);
      box.dataset.metric = key;
      return box;
    });
    if (boxes.length !== grid.children.length || boxes.some((box, index) => grid.children[index] !== box)) grid.replaceChildren(...boxes);
  }

  // Draws all charts as they are to be shown now.
  draw() {
    const { axis, window } = this.view, [column, xLabel] = AXES[axis];
    const ends = this.runs.filter((run) => !this.view.hidden.has(run.index)).map((run) => run.columns[column].at(-1) ?? 0);
    const xEnd = Math.max(...ends, 0);
    for (const [key, chart] of this.charts) {
      const share = /_share$|clip_fraction$|\/avg$|pass_at_|first_round/.test(key);
      chart.update(() => ({
        title: this.titles.get(key) || key, key, xLabel, xEnd, counted: axis === "updates",
        limits: share && !this.view.log ? [0, null] : [null, null],
        series: this.runs.map((run) => run.points(key, axis, window)).filter((one) => one.x.length),
      }), this.view);
    }
    for (const [spec, chart] of this.figures) chart.update(() => spec, this.view);
    const last = window === 1 ? "" : `Means over the last ${window} iterations, on the faint values of each one. `;
    get("curves-note").textContent = last + "Bars are one standard error over problems, shaded is the range from the 10th to the 90th percentile. Drag across a chart to zoom, double-click to see all.";
    get("smoothing-text").textContent = window === 1 ? "none" : String(window);
  }

  showFigures(figures) {
    this.figures = [];
    const made = figures.map((figure) => {
      const box = element("div", "figure"), grid = element("div", "grid");
      for (const panel of figure.panels) grid.append(panel.bars.length ? this.bars(panel) : this.panel(figure, panel));
      box.id = "figure-" + figure.name;
      box.append(element("h3", "", figure.title), grid, element("p", "note", figure.caption));
      return box;
    });
    get("figure-list").replaceChildren(...made);
    get("figures").hidden = document.querySelector("nav a[href='#figures']").hidden = !made.length;
  }

  panel(figure, panel) {
    const key = `${figure.name}/${panel.title}`, chart = this.panels.get(key) || new Group().add();
    this.panels.set(key, chart);
    const series = panel.series.map((one) => ({ ...one, name: this.names[one.run] + (one.faint ? ", first" : "") }));
    const spec = { ...panel, series, named: true };
    this.figures.push([spec, chart]);
    chart.update(() => spec, this.view);
    return chart.box;
  }

  // Bars are grey: colours are those of runs.
  bars(panel) {
    const box = element("figure", "bars"), total = (parts) => parts.reduce((sum, [, length]) => sum + length, 0);
    const most = Math.max(...panel.bars.map(([, parts]) => total(parts))), parts = panel.bars[0][1].map(([name]) => name);
    const lines = panel.bars.map(([name, lengths]) => {
      const bar = element("span", "stack");
      lengths.forEach(([, length], index) => {
        const part = element("span", `part part-${index}`);
        part.style.width = `${100 * length / most}%`;
        bar.append(part);
      });
      return [this.named(this.names.indexOf(name)), bar, ...lengths.map(([, length]) => short(length, 3))];
    });
    const header = ["run", "", ...parts.map((name, index) => {
      const made = element("span", "part-name");
      made.append(element("span", `key part-${index}`), name);
      return made;
    })];
    const wide = element("div", "wide");
    wide.append(this.fill(element("table"), header, lines, "numbers"));
    box.append(element("h4", "", `${panel.title}, ${panel.xLabel}`), wide);
    return box;
  }

  // ---- what a reader can do ---------------------------------------------------------------------------------------

  find() {
    const words = get("find-metric").value.toLowerCase();
    for (const group of get("groups").children) {
      const boxes = [...group.querySelectorAll("figure.chart")];
      for (const box of boxes) box.hidden = !box.dataset.metric.toLowerCase().includes(words);
      group.hidden = boxes.every((box) => box.hidden);
      if (words) group.open = !group.hidden;
    }
  }

  emphasize(run) {
    if (this.view.emphasis === run) return;
    this.view.emphasis = run;
    this.draw();
  }

  listen() {
    const choose = (name, change) => get(name).addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      for (const one of get(name).children) one.setAttribute("aria-pressed", String(one === button));
      change(button.dataset.value);
      this.group.x = null;
      this.draw();
    });
    choose("against", (value) => {
      this.view.axis = value;
      this.group.zoom = null;
    });
    choose("scale", (value) => { this.view.log = value === "log"; });
    get("smoothing").addEventListener("input", (event) => {
      this.view.window = WINDOWS[event.target.value];
      this.draw();
    });
    get("runs").addEventListener("click", (event) => {
      const chip = event.target.closest("button");
      if (!chip) return;
      const run = Number(chip.dataset.run);
      if (!this.view.hidden.delete(run)) this.view.hidden.add(run);
      chip.setAttribute("aria-pressed", String(!this.view.hidden.has(run)));
      this.draw();
    });
    get("runs").addEventListener("pointerover", (event) => {
      const chip = event.target.closest("button");
      if (event.pointerType === "mouse") this.emphasize(chip && !this.view.hidden.has(Number(chip.dataset.run)) ? Number(chip.dataset.run) : null);
    });
    get("runs").addEventListener("pointerleave", () => this.emphasize(null));
    get("find-metric").addEventListener("input", () => this.find());
  }

  // ---- a live page ------------------------------------------------------------------------------------------------

  async ask() {
    if (!document.hidden) {
      try {
        const known = this.runs.map((run) => [run.generation ?? -1, run.count, run.seen ?? 0].join(":")).join(",");
        const answer = await fetch(`data?runs=${known}&version=${this.version}`, { cache: "no-store" });
        if (!answer.ok) throw new Error(answer.status);
        const news = await answer.json();
        this.version = news.version;
        this.lost = null;
        this.take(news);
        if (!this.followed && this.responses.pools.size) {
          this.followed = true;
          this.responses.follow();
        }
      } catch (error) {
        if (!(error instanceof TypeError || /^\d+$/.test(error.message))) throw error;
        this.lost ||= new Date();
        this.status();
      }
    }
    setTimeout(() => this.ask(), EVERY_MS);
  }
}

function duration(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Number((seconds / 3600).toPrecision(2))} h`;
  return `${Math.round(seconds / 86400)} days`;
}

new Page(JSON.parse(get("data").textContent));
