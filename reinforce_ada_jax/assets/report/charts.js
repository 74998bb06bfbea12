"use strict";
// Charts: axes, curves, a crosshair, and a legend with the values below it. Nothing here knows where numbers come from.

const HEIGHT = 176, LEFT = 46, RIGHT = 10, TOP = 10, BOTTOM = 24; // of a chart, in pixels
const LEAST_DRAG = 8; // pixels: a click is no drag
const COLORS = 6, MOST_MARKED = 40; // points of a line that has a marker at each

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawn(name, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

const many = (count) => count.toLocaleString("en");

// Four digits, with a suffix for thousands: 0.9892, 12.35k, 1.2e-7.
function short(value, digits = 4) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size < 1e-3 || size >= 1e15) return value.toExponential(Math.max(0, digits - 3)).replace("e+", "e");
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return String(Number((value / (unit === 1e4 ? 1e3 : unit)).toPrecision(digits))) + suffix;
  }
  return String(Number(value.toPrecision(digits)));
}

const color = (run) => `var(--run-${run % COLORS})`;

function swatch(run) {
  const made = element("span", "swatch");
  made.style.color = color(run);
  if (run >= COLORS) made.classList.add("dashed");
  return made;
}

function steps(low, high, count, whole) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found.map((value) => Number(value.toPrecision(12)));
}

// Texts of ticks with as many digits as make them differ.
function labels(values) {
  const texts = [3, 4, 5, 6, 8, 12].map((digits) => values.map((value) => short(value, digits)));
  return texts.find((found) => new Set(found).size === values.length) || texts.at(-1);
}

function powers(low, high) {
  const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
  if (last <= first) return [...new Set([low, ...(last === first ? [10 ** first] : []), high])];
  const every = Math.ceil((last - first) / 4), found = [];
  for (let power = first; power <= last; power += every) found.push(10 ** power);
  return found;
}

// The mean over the last `window` values, over fewer at the beginning.
function smooth(values, window) {
  return values.map((_, index) => {
    // No running sum: it would keep the rounding of a value such as 1e18 in all later means.
    const last = values.slice(Math.max(0, index + 1 - window), index + 1);
    return last.reduce((sum, value) => sum + value, 0) / last.length;
  });
}

// Indices of at most four points in each column of pixels: a line through them looks like one through all.
function thinned(x, y, columns) {
  if (x.length <= 4 * columns) return x.map((_, index) => index);
  const kept = [], each = x.length / columns;
  for (let column = 0; column < columns; column += 1) {
    const first = Math.floor(column * each), last = Math.min(x.length, Math.floor((column + 1) * each)) - 1;
    let lowest = first, highest = first;
    for (let index = first; index <= last; index += 1) {
      if (y[index] < y[lowest]) lowest = index;
      if (y[index] > y[highest]) highest = index;
    }
    kept.push(...[...new Set([first, lowest, highest, last])].sort((a, b) => a - b));
  }
  return kept;
}

// Index of the value that is nearest; values need no order: entropy rises and falls.
function nearest(values, wanted) {
  let found = 0;
  for (let index = 1; index < values.length; index += 1) {
    if (Math.abs(values[index] - wanted) < Math.abs(values[found] - wanted)) found = index;
  }
  return found;
}

// One chart. `spec`: title, key, xLabel, named (the label is below the axis), limits, powers (x in powers of 2), diagonal, counted, xEnd, and series of
// {run, name, x, y, raw, error, band, faint}. `view`: log, hidden (runs), and emphasis (a run, or null).
class Chart {
  constructor(group) {
    this.group = group; // charts that share a crosshair
    this.box = element("figure", "chart");
    this.title = element("h4");
    this.at = element("span", "at");
    const heading = element("div", "heading");
    heading.append(this.title, this.at);
    this.plot = drawn("svg", { class: "plot", role: "img", tabindex: "0" });
    this.legend = element("ul", "legend");
    this.axisName = element("p", "axis-name");
    this.box.append(heading, this.plot, this.axisName, this.legend);
    this.visible = false;
    this.stale = true;
    this.from = null; // where a drag began
    this.box.chart = this;
    this.plot.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.plot.addEventListener("pointerdown", (event) => {
      this.from = event.pointerType === "mouse" ? event.offsetX : null; // a finger moves the crosshair
      this.point(event.offsetX);
    });
    this.plot.addEventListener("pointerup", (event) => this.release(event.offsetX));
    this.plot.addEventListener("dblclick", () => this.group.zoomTo(null));
    this.plot.addEventListener("pointerleave", (event) => {
      this.release(event.offsetX);
      if (event.pointerType === "mouse") this.share(null);
    });
    this.plot.addEventListener("blur", () => this.share(null));
    this.plot.addEventListener("keydown", (event) => this.press(event));
    Chart.watcher.observe(this.box);
  }

  static watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      entry.target.chart.visible = entry.isIntersecting;
      if (entry.isIntersecting) entry.target.chart.refresh();
    }
  }, { rootMargin: "200px" });

  // `makeSpec` returns the spec: it is called when the chart is drawn.
  update(makeSpec, view) {
    this.makeSpec = makeSpec;
    this.view = view;
    this.stale = true;
    this.refresh();
  }

  // Draws it if it is near the window: dozens of charts that nobody sees cost nothing.
  refresh() {
    if (!this.makeSpec || !this.visible) return;
    const width = this.plot.clientWidth; // the browser lays the page out for it, so only where it is needed
    if (!width || (!this.stale && width === this.width)) return;
    if (this.stale) this.spec = this.makeSpec();
    this.stale = false;
    this.width = width;
    this.draw();
  }

  // ---- scales -----------------------------------------------------------------------------------------------------

  // Values that are drawn: those in the zoom with their neighbours, and on a logarithmic axis those above 0.
  prepare() {
    const { log, hidden } = this.view, [low, high] = this.group.zoom || [-Infinity, Infinity];
    this.series = this.spec.series.filter((one) => !hidden.has(one.run)).map((one) => {
      const { x } = one, near = (index) => x[Math.min(index + 1, x.length - 1)] >= low && x[Math.max(index - 1, 0)] <= high;
      const kept = x.map((_, index) => index).filter((index) => near(index) && (!log || one.y[index] > 0));
      if (kept.length === one.x.length) return one;
      const pick = (values) => values && kept.map((index) => values[index]);
      return { ...one, x: pick(one.x), y: pick(one.y), raw: pick(one.raw), error: pick(one.error),
        band: one.band && one.band.map(pick) };
    }).filter((one) => one.x.length);
  }

  extents() {
    const { spec, view } = this, x = [], y = [];
    for (const one of this.series) {
      for (const value of one.x) x.push(value);
      for (const values of [one.y, one.raw, ...(one.band || [])]) {
        for (const value of values || []) if (!view.log || value > 0) y.push(value);
      }
      (one.error || []).forEach((error, index) => y.push(one.y[index] + error, one.y[index] - error));
    }
    const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
    const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
    const ends = spec.diagonal ? [0, 1] : [spec.powers ? least(x) : Math.min(0, least(x)), spec.xEnd || most(x)];
    this.xEnds = this.group.zoom || (ends[0] === ends[1] ? [ends[0], ends[0] + 1] : ends);
    let low = least(y.filter((value) => !view.log || value > 0)), high = most(y);
    if (view.log) {
      this.yEnds = low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
      return;
    }
    const [bottom, top] = spec.diagonal ? [0, 1] : spec.limits || [null, null];
    if (low >= 0 && low < 0.4 * high) low = 0;
    const room = (high - low || Math.abs(high) || 1) * 0.05;
    this.yEnds = [bottom ?? (low === 0 ? 0 : low - room), top ?? (high === 0 && low < 0 ? 0 : high + room)];
  }

  toX(value) {
    const scale = this.spec.powers ? Math.log2 : (same) => same, [low, high] = this.xEnds.map(scale);
    return LEFT + (scale(value) - low) / (high - low) * (this.width - LEFT - RIGHT);
  }

  toY(value) {
    const scale = this.view.log ? Math.log : (same) => same, [low, high] = this.yEnds.map(scale);
    const share = (scale(Math.max(value, this.view.log ? this.yEnds[0] : value)) - low) / (high - low);
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
  }

  // ---- drawing ----------------------------------------------------------------------------------------------------

  draw() {
    const { spec, view, plot, width } = this;
    this.title.textContent = spec.title;
    this.title.title = spec.key || spec.title;
    plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    plot.setAttribute("aria-label", `${spec.title}${spec.xLabel ? ", against " + spec.xLabel : ""}`);
    plot.replaceChildren();
    this.prepare();
    this.cross = null;
    if (!this.series.length) {
      const text = view.log && spec.series.length ? "no values above 0" : "no run is chosen";
      drawn("text", { x: width / 2, y: HEIGHT / 2, class: "empty" }, plot).textContent = text;
      this.values(null);
      return;
    }
    this.extents();
    this.axes();
    const inside = { x: LEFT - 5, y: 0, width: width - LEFT - RIGHT + 10, height: HEIGHT - BOTTOM + 4 };
    const clip = drawn("svg", { ...inside, viewBox: Object.values(inside).join(" ") }, plot);
    for (const one of this.series) this.line(one, clip);
    this.cross = drawn("g", { class: "cross" }, clip);
    this.show(this.group.x);
  }

  axes() {
    const { spec, view, plot, width } = this;
    const axis = drawn("g", { class: "axis" }, plot), bottom = HEIGHT - BOTTOM;
    const rows = view.log ? powers(...this.yEnds) : steps(...this.yEnds, 4), names = labels(rows);
    rows.forEach((value, index) => {
      const y = this.toY(value);
      drawn("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y }, axis);
      drawn("text", { x: LEFT - 7, y: y + 3.5, class: "left" }, axis).textContent = names[index];
    });
    const [low, high] = this.xEnds, most = Math.max(2, Math.floor(width / 90));
    let marks = steps(low, high, most, spec.counted);
    if (spec.powers) marks = [...Array(24).keys()].map((power) => 2 ** power).filter((k) => k >= low && k <= high);
    const texts = labels(marks);
    marks.forEach((value, index) => {
      const x = this.toX(value), end = x > width - RIGHT - 14;
      drawn("line", { x1: x, x2: x, y1: bottom, y2: bottom + 4, class: "tick" }, axis);
      const label = drawn("text", { x: end ? width - 2 : x, y: HEIGHT - 7, class: end ? "end" : "below" }, axis);
      label.textContent = texts[index];
    });
    if (spec.diagonal) {
      const ends = { x1: this.toX(0), y1: this.toY(0), x2: this.toX(1), y2: this.toY(1) };
      drawn("line", { ...ends, class: "diagonal" }, axis);
    }
  }

  path(x, y) {
    const points = thinned(x, y, Math.max(50, this.width - LEFT - RIGHT));
    return points.map((i, at) => `${at ? "L" : "M"}${this.toX(x[i]).toFixed(1)} ${this.toY(y[i]).toFixed(1)}`).join("");
  }

  line(one, parent) {
    const away = this.view.emphasis !== null && this.view.emphasis !== one.run;
    const group = drawn("g", { class: "line" + (one.faint ? " faint" : "") + (away ? " away" : "") }, parent);
    group.style.color = color(one.run);
    if (one.band) {
      const [low, high] = one.band, back = (values) => [...values].reverse();
      const points = [...one.x, ...back(one.x)], edge = [...high, ...back(low)];
      const d = points.map((x, i) => `${i ? "L" : "M"}${this.toX(x).toFixed(1)} ${this.toY(edge[i]).toFixed(1)}`);
      drawn("path", { d: d.join(""), class: "band" }, group);
    }
    if (one.raw) drawn("path", { d: this.path(one.x, one.raw), class: "raw" }, group);
    drawn("path", { d: this.path(one.x, one.y), class: "curve" + (one.run >= COLORS ? " dashed" : "") }, group);
    (one.error || []).forEach((error, i) => {
      const x = this.toX(one.x[i]);
      drawn("line", { x1: x, x2: x, y1: this.toY(one.y[i] - error), y2: this.toY(one.y[i] + error) }, group);
    });
    if (one.x.length > MOST_MARKED) return;
    one.x.forEach((x, i) => drawn("circle", { cx: this.toX(x), cy: this.toY(one.y[i]), r: 2.6 }, group));
  }

  // ---- crosshair --------------------------------------------------------------------------------------------------

  // The value of the x axis below a place of the mouse.
  valueAt(offset) {
    const { spec, width } = this, share = (offset - LEFT) / (width - LEFT - RIGHT);
    const scale = spec.powers ? Math.log2 : (same) => same, [low, high] = this.xEnds.map(scale);
    const at = low + Math.min(1, Math.max(0, share)) * (high - low);
    return spec.powers ? 2 ** at : at;
  }

  point(offset) {
    if (!this.series || !this.series.length) return;
    this.share(this.valueAt(offset));
    if (this.from === null || Math.abs(offset - this.from) < LEAST_DRAG) return;
    const box = { x: Math.min(offset, this.from), width: Math.abs(offset - this.from), y: TOP, height: HEIGHT - TOP - BOTTOM };
    drawn("rect", { ...box, class: "selected" }, this.cross);
  }

  // The end of a drag: the range that it crossed is all that the charts of the group show.
  release(offset) {
    const { from } = this;
    this.from = null;
    if (from === null || !this.cross || Math.abs(offset - from) < LEAST_DRAG) return;
    const range = [from, offset].map((at) => this.valueAt(at)).sort((a, b) => a - b);
    if (range[0] < range[1]) this.group.zoomTo(range);
  }

  press(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || !this.series || !this.series.length) return;
    event.preventDefault();
    const { x } = this.series[0], from = this.group.x === null ? x.length - 1 - by : nearest(x, this.group.x);
    this.share(x[Math.min(x.length - 1, Math.max(0, from + by))]);
  }

  share(x) {
    this.group.x = x;
    for (const chart of this.group.members) if (chart.visible) chart.show(x);
  }

  show(x) {
    if (!this.cross) return;
    this.cross.replaceChildren();
    if (x === null) {
      this.values(null);
      return;
    }
    const found = new Map();
    let line = null;
    for (const one of this.series) {
      const index = nearest(one.x, x);
      found.set(one, index);
      if (line === null || Math.abs(one.x[index] - x) < Math.abs(line - x)) line = one.x[index];
    }
    drawn("line", { x1: this.toX(line), x2: this.toX(line), y1: TOP, y2: HEIGHT - BOTTOM }, this.cross);
    for (const [one, index] of found) {
      const mark = drawn("circle", { cx: this.toX(one.x[index]), cy: this.toY(one.y[index]), r: 4 }, this.cross);
      mark.style.color = color(one.run);
    }
    this.values(found, line);
  }

  // The legend: the value of each line at the crosshair, otherwise the last one.
  values(found, x) {
    const { xLabel, named } = this.spec;
    this.at.textContent = found ? `${named ? "" : xLabel} ${short(x, 6)}`.trim() : "";
    this.axisName.textContent = named ? xLabel : "";
    this.legend.classList.toggle("long", this.spec.series.some((one) => one.error || one.band || one.faint));
    const entries = (this.series || []).map((one) => {
      const index = found ? found.get(one) : one.x.length - 1;
      const entry = element("li", one.faint ? "faint" : "");
      entry.dataset.run = one.run;
      const name = element("span", "name", one.name);
      name.title = one.name; // a long one is cut
      const error = one.error && one.error[index] ? ` ± ${short(one.error[index], 2)}` : "";
      const range = one.band ? ` (${short(one.band[0][index], 3)}–${short(one.band[1][index], 3)})` : "";
      entry.append(swatch(one.run), name, element("b", "", short(one.y[index]) + error + range));
      return entry;
    });
    this.legend.replaceChildren(...entries);
  }
}

// Charts that share a crosshair and a zoom, because their x axes mean the same.
class Group {
  constructor() {
    this.x = null;
    this.zoom = null; // [low, high] of x, if not all is shown
    this.members = new Set();
  }
  add() {
    const made = new Chart(this);
    this.members.add(made);
    return made;
  }
  zoomTo(range) {
    this.zoom = range;
    this.x = null;
    for (const chart of this.members) {
      chart.stale = true;
      chart.refresh();
    }
  }
}

new ResizeObserver(() => {
  for (const box of document.querySelectorAll("figure.chart")) box.chart.refresh();
}).observe(document.body);
