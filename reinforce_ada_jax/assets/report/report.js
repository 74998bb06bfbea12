"use strict";
// The table of responses: sorted, filtered and shown a page at a time. Responses are put on the page as text only.
(function () {
  const table = document.getElementById("table");
  if (!table) return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const SHORT = 160; // characters that a cell shows whole; of a longer one the beginning, and of a response the end

  const responses = data.rows.map((cells, order) => {
    const row = Object.fromEntries(data.columns.map((column, index) => [column, cells[index]]));
    const [problem, answer] = data.problems[row.problem];
    const verdict = row.correct ? "right" : "wrong";
    return {
      ...row, order, problem, answer, verdict, runName: data.runs[row.run],
      searched: [problem, answer, row.response].join("\n").toLowerCase(),
    };
  });

  const number = (digits) => (value) => value === null ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
  // [heading, key to sort by, how it is shown, class]
  const columns = [
    ["Iteration", "iteration", number(0), "number"],
    ...(data.runs.length > 1 ? [["Run", "runName", String, "run"]] : []),
    ["Problem", "problem", null, "text problem"],
    ["Answer", "answer", null, "text"],
    ["Response", "response", null, "text response"],
    ["Boxed", "boxed", null, "text"],
    ["Verdict", "verdict", null, "verdict"],
    ["Reward", "reward", number(3), "number"],
    ["Advantage", "advantage", number(3), "number"],
    ["Tokens", "tokens", number(0), "number"],
  ];
  const TEXTS = columns.filter((column) => column[3].startsWith("text"));
  // The newest first.
  const state = { key: "iteration", descending: true, page: 0 };
  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const control = (name) => document.getElementById(name);

  // ---- which responses -----------------------------------------------------------------------------------------

  const inUpdate = {
    "": () => true,
    kept: (row) => row.advantage !== null,
    signal: (row) => row.advantage !== null && row.advantage !== 0,
    left: (row) => row.advantage === null,
  };

  function matching() {
    const words = control("filter-text").value.toLowerCase();
    const run = control("filter-run").value, iteration = control("filter-iteration").value;
    const verdict = control("filter-verdict").value, kept = inUpdate[control("filter-kept").value];
    return responses.filter((row) =>
      (run === "" || row.run === Number(run)) &&
      (iteration === "" || row.iteration === Number(iteration)) &&
      (verdict === "" || row.verdict === verdict || "reason:" + row.reason === verdict ||
        (verdict === "truncated" && row.truncated)) &&
      kept(row) && (words === "" || row.searched.includes(words)));
  }

  // What a response lacks comes last, whichever way; equals keep the order in which they were drawn.
  function compare(first, second) {
    const a = first[state.key], b = second[state.key];
    const lacking = (a === null) - (b === null);
    if (lacking || a === null) return lacking || first.order - second.order;
    const sign = state.descending ? -1 : 1;
    return (a < b ? -sign : a > b ? sign : 0) || first.order - second.order;
  }

  // ---- how they are shown --------------------------------------------------------------------------------------

  function verdictCell(cell, row) {
    cell.append(element("span", row.verdict, (row.correct ? "✓ " : "✗ ") + row.verdict));
    const notes = [row.reason, row.truncated ? "cut off at the limit" : ""].filter(Boolean);
    if (notes.length) cell.append(element("span", "note", notes.join(", ")));
  }

  const isLong = (text) => text !== null && (text.length > SHORT || text.includes("\n"));

  function preview(text, end) {
    const line = text.replace(/\s+/g, " ").trim();
    return line.length <= SHORT ? line : line.slice(0, SHORT - end) + " … " + line.slice(line.length - end);
  }

  function textCell(row, key, line) {
    const box = element("div"), text = row[key];
    const shown = element("span", "", text === null ? "–" : isLong(text) ? preview(text, key === "response" ? 80 : 0) : text);
    shown.dir = "auto";
    box.append(shown);
    if (key === "response" && TEXTS.some(([, other]) => isLong(row[other]))) box.append(" ", readButton(row, line));
    return box;
  }

  function whole(row) {
    const line = element("tr", "whole"), cell = element("td");
    cell.colSpan = columns.length;
    for (const [heading, key] of TEXTS) {
      if (key !== "problem" && key !== "response" && !isLong(row[key])) continue;
      const block = element("pre", "", row[key]);
      block.dir = "auto";
      cell.append(element("h4", "", key === "response" ? heading + ", draw " + row.draw : heading), block);
    }
    line.append(cell);
    return line;
  }

  function readButton(row, line) {
    const button = element("button", "read", "Read");
    button.type = "button";
    button.setAttribute("aria-expanded", "false");
    button.setAttribute("aria-label", "Read the whole response, draw " + row.draw + " of iteration " + row.iteration);
    let opened = null;
    button.addEventListener("click", () => {
      if (opened) { opened.remove(); opened = null; } else { opened = whole(row); line.after(opened); }
      button.textContent = opened ? "Close" : "Read";
      button.setAttribute("aria-expanded", String(Boolean(opened)));
    });
    return button;
  }

  function tableRow(row) {
    const line = element("tr");
    for (const [heading, key, shown, className] of columns) {
      const cell = element("td", className);
      cell.dataset.label = heading;
      if (key === "verdict") verdictCell(cell, row);
      else if (shown) cell.append(element("span", "", shown(row[key])));
      else cell.append(textCell(row, key, line));
      line.append(cell);
    }
    return line;
  }

  function show() {
    const found = matching().sort(compare);
    const size = Number(control("size").value), pages = Math.max(1, Math.ceil(found.length / size));
    state.page = Math.min(state.page, pages - 1);
    const first = state.page * size, shown = found.slice(first, first + size);
    table.tBodies[0].replaceChildren(...shown.map(tableRow));
    const many = (count) => count.toLocaleString("en");
    control("count").textContent = found.length === 0
      ? "No response matches; there are " + many(responses.length) + " on this page."
      : many(first + 1) + " to " + many(first + shown.length) + " of " + many(found.length) +
        (found.length < responses.length ? " that match, of " + many(responses.length) : "") + " responses";
    control("page").textContent = "Page " + many(state.page + 1) + " of " + many(pages);
    control("previous").disabled = state.page === 0;
    control("next").disabled = state.page === pages - 1;
    [...table.tHead.rows[0].cells].forEach((cell, index) => {
      const sorted = columns[index][1] === state.key;
      cell.setAttribute("aria-sort", sorted ? (state.descending ? "descending" : "ascending") : "none");
    });
  }

  // ---- what a reader can do ------------------------------------------------------------------------------------

  function options(name, entries) {
    for (const [value, text] of entries) {
      const option = element("option", "", text);
      option.value = value;
      control(name).append(option);
    }
  }

  for (const [heading, key, , className] of columns) {
    const cell = element("th", className.includes("number") ? "number" : ""), button = element("button", "", heading);
    cell.scope = "col";
    button.type = "button";
    button.addEventListener("click", () => {
      state.descending = state.key === key ? !state.descending : false;
      state.key = key;
      state.page = 0;
      show();
    });
    cell.append(button);
    table.tHead.rows[0].append(cell);
  }
  const iterations = [...new Set(responses.map((row) => row.iteration))].sort((a, b) => b - a);
  const reasons = [...new Set(responses.map((row) => row.reason).filter(Boolean))].sort();
  options("filter-run", data.runs.map((name, index) => [index, name]));
  options("filter-iteration", iterations.map((iteration) => [iteration, iteration]));
  options("filter-verdict", [["right", "right"], ["wrong", "wrong"], ["truncated", "cut off at the limit"],
    ...reasons.map((reason) => ["reason:" + reason, reason])]);
  control("filter-run").parentElement.hidden = data.runs.length === 1;

  const filters = control("filters");
  const again = () => { state.page = 0; show(); };
  filters.addEventListener("input", again);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("reset", () => setTimeout(again));
  control("size").addEventListener("change", again);
  const turn = (by) => { state.page += by; show(); table.scrollIntoView({ block: "start" }); };
  control("previous").addEventListener("click", () => turn(-1));
  control("next").addEventListener("click", () => turn(1));
  for (const part of [filters, table, control("pages")]) part.hidden = false;
  show();
})();
