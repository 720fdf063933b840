// The list of runs: status, progress, loss, speed and age; a check box puts the curves of a run on the charts.

import { element, emptyState } from "./dom.js";
import { compact, count, dateTime, duration, significant } from "./format.js";
import { COLORS } from "./state.js";

const ORDERS = {
  started: ["Newest first", (a, b) => (b.started ?? 0) - (a.started ?? 0)],
  name: ["By name", (a, b) => a.name.localeCompare(b.name, "en", { numeric: true })],
  loss: ["Lowest loss first", (a, b) => (a.loss ?? Infinity) - (b.loss ?? Infinity)],
  status: ["By status", (a, b) => a.status.localeCompare(b.status) || (b.started ?? 0) - (a.started ?? 0)],
};

export class RunList {
  #rows = new Map();
  #filter = "";
  #order = "started";

  constructor(section, state, slots) {
    this.state = state;
    this.slots = slots;
    this.runs = new Map();
    this.title = element("h2", { id: "runs-title" }, "Runs");
    this.list = element("ul", { className: "runs" });
    this.note = element("p", { className: "note" });
    const filter = element("input", { type: "search", placeholder: "Filter", "aria-label": "Filter runs by name" });
    filter.addEventListener("input", () => {
      this.#filter = filter.value.toLowerCase();
      this.draw();
    });
    const options = Object.entries(ORDERS).map(([value, [title]]) => element("option", { value }, title));
    const order = element("select", { "aria-label": "Order of the runs" }, options);
    order.addEventListener("change", () => {
      this.#order = order.value;
      this.draw();
    });
    this.tools = element("div", { className: "tools" }, filter, order);
    section.append(this.title, this.tools, this.list, this.note);
  }

  /** Take over an answer of the server: changed runs, and the names of all. */
  update(answer) {
    for (const run of answer.runs) this.runs.set(run.name, run);
    const names = new Set(answer.names);
    for (const name of [...this.runs.keys()]) if (!names.has(name)) this.runs.delete(name);
    this.note.textContent = answer.left_out ? `${count(answer.left_out)} older runs are not listed.` : "";
    this.draw();
  }

  /** The latest runs, which are selected when nothing else is. */
  latest(number) {
    return [...this.runs.values()]
      .sort(ORDERS.started[1])
      .slice(0, number)
      .map((run) => run.name);
  }

  draw() {
    const shown = [...this.runs.values()].filter((run) => run.name.toLowerCase().includes(this.#filter));
    shown.sort(ORDERS[this.#order][1]);
    this.title.textContent = this.runs.size ? `Runs (${count(this.runs.size)})` : "Runs";
    this.tools.hidden = this.runs.size < 2;
    const rows = shown.map((run) => this.#row(run));
    if (!this.runs.size) rows.push(element("li", {}, emptyState("No runs yet. Start one:", "trainyard train")));
    else if (!shown.length) rows.push(element("li", {}, emptyState("No run has this in its name.")));
    const focused = document.activeElement;
    if (rows.length !== this.list.children.length || rows.some((row, index) => row !== this.list.children[index])) {
      this.list.replaceChildren(...rows);
      if (this.list.contains(focused)) focused.focus();
    }
  }

  /** The row of a run. It is made once and then changed, so that it keeps the focus. */
  #row(run) {
    let row = this.#rows.get(run.name);
    if (!row) {
      row = this.#createRow(run.name);
      this.#rows.set(run.name, row);
    }
    const { box, status, facts, button } = row.parts;
    const slot = this.slots.of(run.name);
    box.checked = this.state.runs.includes(run.name);
    row.dataset.color = slot === undefined ? "" : slot % COLORS;
    button.setAttribute("aria-pressed", this.state.run === run.name);
    status.textContent = run.status;
    status.className = `status ${run.status}`;
    status.title = run.note ?? "";
    facts.replaceChildren(status, ...runFacts(run).map((fact) => element("span", {}, fact)));
    facts.title = `started ${dateTime(run.started)}`;
    return row;
  }

  #createRow(name) {
    const box = element("input", { type: "checkbox", "aria-label": `Show the curves of ${name}` });
    box.addEventListener("change", () => this.state.toggleRun(name));
    const button = element("button", { type: "button", className: "name", title: `Details of ${name}` }, name);
    button.addEventListener("click", () => {
      const runs = this.state.runs.includes(name) ? this.state.runs : [...this.state.runs, name];
      this.state.set({ runs, run: name });
    });
    const status = element("span", { className: "status" });
    const facts = element("p", { className: "facts" });
    const row = element("li", {}, box, element("div", {}, button, facts));
    row.parts = { box, status, facts, button };
    return row;
  }
}

function runFacts(run) {
  const step = run.step === undefined ? "no step yet" : `step ${count(run.step)}`;
  return [
    run.steps && run.step !== undefined ? `${step} of ${count(run.steps)}` : step,
    run.loss_text ? `loss ${run.loss_text}` : run.loss !== undefined ? `loss ${significant(run.loss, 4)}` : "",
    run.tokens_per_second !== undefined ? `${compact(run.tokens_per_second)} tokens/s` : "",
    run.started ? `${duration(Date.now() / 1000 - run.started)} ago` : "",
  ].filter(Boolean);
}
