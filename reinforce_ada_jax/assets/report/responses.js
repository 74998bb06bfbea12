// Responses by prompt: pools that are sorted, filtered, opened and linked to. Texts are put on the page as text only.

class Responses {
  constructor() {
    this.pools = new Map(); // by key
    this.runs = [];
    this.open = new Set(); // keys
    this.sort = { key: "iteration", descending: true };
    this.page = 0;
    this.marked = null; // [key, draw] that the address names
    this.table = document.getElementById("table");
    this.listen();
  }

  static MOST = 20000; // responses
  static SHORT = 160; // characters of a cell
  static LINES = 12; // of a response that is not opened

  static key(run, iteration, prompt) { return JSON.stringify([run, iteration, prompt]); }

  // ---- data -------------------------------------------------------------------------------------------------------

  // Takes rows as the page's data has them; of a run that began again, `forget` comes first.
  add(data, runs) {
    this.runs = runs;
    for (const cells of data.rows) {
      const row = Object.fromEntries(data.columns.map((column, index) => [column, cells[index]]));
      [row.problem, row.answer] = data.problems[row.problem];
      const key = Responses.key(row.run, row.iteration, row.prompt);
      if (!this.pools.has(key)) {
        const { run, iteration, prompt, problem, answer } = row;
        this.pools.set(key, { key, run, iteration, prompt, problem, answer, responses: [], order: this.pools.size });
      }
      this.pools.get(key).responses.push(row);
    }
    for (const pool of this.pools.values()) if (!pool.draws) this.finish(pool);
    this.drop();
    this.byPrompt = new Map();
    for (const pool of this.pools.values()) {
      const name = JSON.stringify([pool.prompt, pool.problem]);
      this.byPrompt.set(name, [...(this.byPrompt.get(name) || []), pool]);
    }
  }

  // A page that is open for days keeps the newest iterations.
  drop() {
    let total = this.total;
    const oldest = [...this.pools.values()].sort((a, b) => a.iteration - b.iteration);
    for (const pool of oldest) {
      if (total <= Responses.MOST) break;
      total -= pool.draws;
      this.pools.delete(pool.key);
    }
  }

  forget(run) {
    for (const [key, pool] of this.pools) if (pool.run === run) this.pools.delete(key);
  }

  // Numbers of a pool that columns show and sort by.
  finish(pool) {
    const { responses } = pool, mean = (key) => responses.reduce((sum, row) => sum + (row[key] ?? 0), 0) / responses.length;
    responses.sort((a, b) => a.draw - b.draw);
    pool.draws = responses.length;
    pool.correct = responses.filter((row) => row.correct).length;
    pool.rate = pool.correct / pool.draws;
    pool.kept = responses.filter((row) => row.advantage !== null).length;
    pool.tokens = mean("tokens");
    pool.reward = mean("reward");
    pool.cut = responses.filter((row) => row.truncated).length;
    pool.searched = [pool.prompt, pool.problem, pool.answer, ...responses.map((row) => row.response)].join("\n").toLowerCase();
  }

  get total() { return [...this.pools.values()].reduce((sum, pool) => sum + pool.draws, 0); }

  // ---- which ------------------------------------------------------------------------------------------------------

  // Returns a test of a response by the filters other than run, iteration and search.
  wanted() {
    const verdict = this.value("verdict"), kept = this.value("kept");
    return (row) =>
      (verdict === "" || (verdict === "right" && row.correct) || (verdict === "wrong" && !row.correct) ||
        (verdict === "truncated" && row.truncated) || "reason:" + row.reason === verdict) &&
      (kept === "" || (kept === "left" ? row.advantage === null
        : row.advantage !== null && (kept === "kept" || row.advantage !== 0)));
  }

  value(name) { return document.getElementById("filter-" + name).value; }

  matching() {
    const words = this.value("text").toLowerCase(), run = this.value("run"), iteration = this.value("iteration");
    const wanted = this.wanted(), found = [];
    for (const pool of this.pools.values()) {
      if ((run !== "" && pool.run !== Number(run)) || (iteration !== "" && pool.iteration !== Number(iteration))) continue;
      if (words !== "" && !pool.searched.includes(words)) continue;
      const ofPrompt = [pool.prompt, pool.problem, pool.answer].join("\n").toLowerCase().includes(words);
      const shown = pool.responses.filter((row) => wanted(row) && (ofPrompt || row.response.toLowerCase().includes(words)));
      if (shown.length) found.push({ pool, shown });
    }
    const { key, descending } = this.sort, sign = descending ? -1 : 1;
    const by = ({ pool }) => key === "run" ? this.runs[pool.run] : pool[key];
    return found.sort((a, b) => (by(a) < by(b) ? -sign : by(a) > by(b) ? sign : 0) || a.pool.order - b.pool.order);
  }

  // ---- table ------------------------------------------------------------------------------------------------------

  // [heading, key, cell's content, class], without those that are empty for every prompt.
  columns() {
    const pools = [...this.pools.values()], any = (test) => pools.some(test);
    return [
      ["Iteration", "iteration", (pool) => many(pool.iteration), "number"],
      any((pool) => pool.run !== pools[0].run) && ["Run", "run", (pool) => this.runName(pool), "run"],
      ["Problem", "problem", (pool) => this.text(pool.problem), "text problem"],
      any((pool) => pool.answer) && ["Answer", "answer", (pool) => this.text(pool.answer), "text"],
      ["Correct", "rate", (pool) => this.rate(pool), "number"],
      any((pool) => pool.kept) && ["Kept", "kept", (pool) => many(pool.kept), "number"],
      any((pool) => pool.reward !== pool.rate) && ["Reward", "reward", (pool) => short(pool.reward, 3), "number"],
      ["Tokens", "tokens", (pool) => short(pool.tokens, 3), "number"],
      any((pool) => pool.cut) && ["Cut off", "cut", (pool) => many(pool.cut), "number"],
    ].filter(Boolean);
  }

  runName(pool) {
    const made = element("span");
    made.append(swatch(pool.run), element("bdi", "", this.runs[pool.run]));
    return made;
  }

  text(text) {
    const line = text.replace(/\s+/g, " ").trim();
    const made = element("span", "", line.length > Responses.SHORT ? line.slice(0, Responses.SHORT) + " …" : line);
    made.dir = "auto";
    return made;
  }

  rate(pool) {
    const made = element("span", "rate"), meter = element("span", "meter"), part = element("span");
    part.style.width = `${100 * pool.rate}%`;
    meter.append(part);
    made.append(element("span", "", `${many(pool.correct)} of ${many(pool.draws)}`), meter);
    return made;
  }

  show() {
    const columns = this.columns(), found = this.matching();
    const size = Number(document.getElementById("size").value), pages = Math.max(1, Math.ceil(found.length / size));
    this.page = Math.min(this.page, pages - 1);
    const first = this.page * size, shown = found.slice(first, first + size);
    this.head(columns);
    this.table.tBodies[0].replaceChildren(...shown.flatMap((entry) => this.rows(entry, columns)));
    const responses = found.reduce((sum, entry) => sum + entry.shown.length, 0), total = this.total;
    document.getElementById("count").textContent = found.length === 0
      ? `No response matches; there are ${many(total)} on this page.`
      : `${many(responses)} ${responses < total ? `of ${many(total)} ` : ""}responses to ${many(found.length)} ${found.length === 1 ? "prompt" : "prompts"}`;
    document.getElementById("page").textContent = `Page ${many(this.page + 1)} of ${many(pages)}`;
    document.getElementById("previous").disabled = this.page === 0;
    document.getElementById("next").disabled = this.page === pages - 1;
    document.getElementById("pages").hidden = this.pools.size <= (innerWidth > 600 ? 25 : 10);
  }

  head(columns) {
    const cells = columns.map(([heading, key, , className]) => {
      const cell = element("th", className.includes("number") ? "number" : ""), button = element("button", "", heading);
      const sorted = this.sort.key === key;
      cell.scope = "col";
      cell.setAttribute("aria-sort", sorted ? (this.sort.descending ? "descending" : "ascending") : "none");
      button.type = "button";
      button.dataset.key = key;
      cell.append(button);
      return cell;
    });
    this.table.tHead.rows[0].replaceChildren(element("th", "opener"), ...cells);
  }

  rows({ pool, shown }, columns) {
    const line = element("tr", "pool"), opener = element("td", "opener"), button = element("button", "open");
    const isOpen = this.open.has(pool.key);
    button.type = "button";
    button.dataset.pool = pool.key;
    button.setAttribute("aria-expanded", String(isOpen));
    button.setAttribute("aria-label", `Responses to ${pool.prompt} in iteration ${pool.iteration}`);
    opener.append(button);
    line.append(opener);
    for (const [heading, , content, className] of columns) {
      const cell = element("td", className);
      cell.dataset.label = heading;
      cell.append(content(pool));
      line.append(cell);
    }
    return isOpen ? [line, this.opened(pool, shown, columns.length + 1)] : [line];
  }

  // ---- one pool ---------------------------------------------------------------------------------------------------

  address(pool, draw) {
    const parts = [this.runs[pool.run], pool.iteration, pool.prompt, ...(draw === undefined ? [] : [draw])];
    // Half a character can't be part of an address.
    return "#pool/" + parts.map((part) => encodeURIComponent(String(part).replace(/\p{Surrogate}/gu, "\ufffd"))).join("/");
  }

  opened(pool, shown, width) {
    const line = element("tr", "whole"), cell = element("td"), facts = element("p", "facts");
    cell.colSpan = width;
    const link = element("a", "", "Link");
    link.href = this.address(pool);
    link.setAttribute("aria-label", "Permanent link to this prompt in this iteration");
    facts.append(element("span", "", `Prompt ${pool.prompt}`), element("span", "", `iteration ${many(pool.iteration)}`), link);
    cell.append(facts, this.block("Problem", pool.problem));
    if (pool.answer) cell.append(this.block("Answer", pool.answer));
    const history = this.history(pool);
    if (history) cell.append(history);
    const left = pool.responses.length - shown.length;
    cell.append(element("h4", "", `${many(shown.length)} responses` + (left ? `, ${many(left)} others do not match` : "")));
    const same = new Map();
    for (const row of shown) {
      const name = JSON.stringify([row.response, row.correct, row.reason]);
      same.set(name, [...(same.get(name) || []), row]);
    }
    for (const rows of same.values()) cell.append(this.response(pool, rows));
    line.append(cell);
    return line;
  }

  block(heading, text) {
    const made = element("div", "block"), whole = element("pre", "", text);
    whole.dir = "auto";
    made.append(element("h4", "", heading), whole);
    return made;
  }

  // Equal responses, as one.
  response(pool, rows) {
    const [row] = rows, made = element("article", "response"), facts = element("p", "facts");
    const kept = rows.filter((one) => one.advantage !== null), draws = rows.map((one) => one.draw);
    const fact = (text, className) => { if (text) facts.append(element("span", className, text)); };
    fact((row.correct ? "✓ right" : "✗ wrong"), row.correct ? "right" : "wrong");
    fact(row.reason);
    if (kept.length) {
      const which = kept.length < rows.length ? ` ${kept.map((one) => one.draw).join(", ")}` : "";
      fact(`kept${which}`, "kept");
      fact(`advantage ${short(kept[0].advantage, 3)}`);
      made.classList.add("in-update");
    }
    if (row.reward !== null && row.reward !== Number(row.correct)) fact(`reward ${short(row.reward, 3)}`);
    if (row.boxed !== null) fact(`boxed ${row.boxed.slice(0, Responses.SHORT)}`);
    fact(`${many(row.tokens)} tokens`);
    fact(row.truncated ? "cut off at the limit" : "");
    fact(rows.length > 1 ? `${many(rows.length)} equal draws: ${draws.join(", ")}` : `draw ${draws[0]}`);
    const link = element("a", "", "Link");
    link.href = this.address(pool, draws[0]);
    link.setAttribute("aria-label", `Permanent link to draw ${draws[0]}`);
    facts.append(link);
    const whole = element("pre", "text", row.response);
    whole.dir = "auto";
    made.append(facts, whole);
    const [key, draw] = this.marked || [];
    const named = key === pool.key && draws.includes(draw);
    if (named) made.classList.add("named");
    if (!named && (row.response.split("\n").length > Responses.LINES || row.response.length > 1500)) {
      const more = element("button", "more", "Show all");
      more.type = "button";
      whole.classList.add("short");
      more.addEventListener("click", () => { whole.classList.remove("short"); more.remove(); });
      made.append(more);
    }
    return made;
  }

  // The pass rate of the prompt over the iterations that drew it, if several did.
  history(pool) {
    const pools = this.byPrompt.get(JSON.stringify([pool.prompt, pool.problem])).filter((one) => one.draws);
    if (pools.length < 2) return null;
    const made = element("div", "history"), series = [];
    for (const run of [...new Set(pools.map((one) => one.run))].sort((a, b) => a - b)) {
      const own = pools.filter((one) => one.run === run).sort((a, b) => a.iteration - b.iteration);
      series.push({ run, name: this.runs[run], x: own.map((one) => one.iteration), y: own.map((one) => one.rate) });
    }
    if (series.some((one) => one.x.length > 1)) {
      const chart = new Group().add();
      made.append(chart.box);
      const spec = { title: "Share correct of this prompt", xLabel: "iteration", named: true, limits: [0, 1.05], counted: true, series };
      chart.update(() => spec, { log: false, hidden: new Set(), emphasis: null });
    }
    const others = element("p", "facts", "Also drawn in:");
    for (const one of pools.filter((other) => other !== pool).slice(-20)) {
      const name = this.runs.length > 1 ? `${this.runs[one.run]}, ` : "";
      const link = element("a", "", `${name}iteration ${many(one.iteration)} (${one.correct} of ${one.draws})`);
      link.href = this.address(one);
      others.append(link);
    }
    made.append(others);
    return made;
  }

  // ---- what a reader can do ---------------------------------------------------------------------------------------

  options() {
    const fill = (name, entries) => {
      const control = document.getElementById("filter-" + name), chosen = control.value;
      while (control.options.length > 1) control.remove(1);
      for (const [value, text] of entries) {
        const option = element("option", "", text);
        option.value = value;
        control.append(option);
      }
      control.value = chosen;
    };
    const pools = [...this.pools.values()], reasons = new Set();
    for (const pool of pools) for (const row of pool.responses) if (row.reason) reasons.add(row.reason);
    const cut = pools.some((pool) => pool.cut) ? [["truncated", "cut off at the limit"]] : [];
    const iterations = [...new Set(pools.map((pool) => pool.iteration))].sort((a, b) => b - a);
    fill("run", this.runs.map((name, index) => [index, name]));
    fill("iteration", iterations.map((iteration) => [iteration, iteration]));
    fill("verdict", [["right", "right"], ["wrong", "wrong"], ...cut,
      ...[...reasons].sort().map((reason) => ["reason:" + reason, reason])]);
    document.getElementById("filter-run").parentElement.hidden = this.runs.length === 1;
  }

  refresh() {
    const some = this.pools.size > 0;
    for (const name of ["filters", "table", "pages"]) document.getElementById(name).hidden = !some;
    document.getElementById("fresh").hidden = true;
    if (!some) return;
    this.options();
    this.show();
  }

  // New responses of a live page move nothing that someone reads: they wait for a click.
  offer() {
    if (!this.open.size && this.page === 0 && !this.table.contains(document.activeElement)) {
      this.refresh();
      return;
    }
    const button = document.getElementById("fresh");
    button.textContent = "Show new responses";
    button.hidden = false;
  }

  // Opens the pool, and the response, that the address names.
  follow() {
    const [kind, ...parts] = location.hash.split("/");
    if (kind !== "#pool" || parts.length < 3) return;
    let names;
    try { names = parts.map(decodeURIComponent); } catch { return; }
    const [name, iteration, prompt, draw] = names;
    const plain = (text) => text.replace(/\p{Surrogate}/gu, "\ufffd");
    const pool = [...this.pools.values()].find((one) => one.iteration === Number(iteration) &&
      plain(one.prompt) === prompt && plain(this.runs[one.run]) === name);
    if (!pool) {
      document.getElementById("count").textContent = "The response of this link is not on this page.";
      document.getElementById("responses").scrollIntoView();
      return;
    }
    for (const control of document.getElementById("filters").elements) if (control.type !== "reset") control.value = "";
    this.marked = [pool.key, draw === undefined ? null : Number(draw)];
    this.open.add(pool.key);
    const size = Number(document.getElementById("size").value);
    this.page = Math.floor(this.matching().findIndex((entry) => entry.pool === pool) / size);
    this.refresh();
    const button = this.table.querySelector(`button[data-pool="${CSS.escape(pool.key)}"]`);
    (this.table.querySelector(".named") || button.closest("tr")).scrollIntoView({ block: "start" });
  }

  turn(by) {
    this.page += by;
    this.show();
    document.getElementById("filters").scrollIntoView({ block: "start" });
  }

  listen() {
    const on = (name, event, action) => document.getElementById(name).addEventListener(event, action);
    const again = () => { this.page = 0; this.show(); };
    on("filters", "input", again);
    on("filters", "submit", (event) => event.preventDefault());
    on("filters", "reset", () => setTimeout(again));
    if (innerWidth <= 600) document.getElementById("size").value = "10"; // a phone's page is short
    on("size", "change", again);
    on("previous", "click", () => this.turn(-1));
    on("next", "click", () => this.turn(1));
    on("fresh", "click", () => this.refresh());
    on("table", "click", (event) => {
      const button = event.target.closest("button"), row = event.target.closest("tr.pool");
      if (button && button.dataset.key) {
        const { key } = button.dataset;
        this.sort = { key, descending: this.sort.key === key ? !this.sort.descending : false };
        again();
        this.table.querySelector(`button[data-key="${key}"]`).focus();
      } else if (row && String(getSelection()) === "") {
        const { pool } = row.querySelector("button.open").dataset;
        if (!this.open.delete(pool)) this.open.add(pool);
        this.show();
        this.table.querySelector(`button[data-pool="${CSS.escape(pool)}"]`).focus({ preventScroll: true });
      }
    });
    addEventListener("hashchange", () => this.follow());
  }
}
