// Everything about one run: facts, and tabs with its events, step times, plan, configuration, checkpoints, data,
// rollouts, texts, log.

import { element, emptyState } from "./dom.js";
import { compact, count, dateTime, percent, significant } from "./format.js";
import { checkpointsPanel, configPanel, eventsPanel, logPanel, planPanel, stepTimesPanel } from "./panels.js";
import { inputsPanel, rolloutsPanel, samplesPanel } from "./text_panels.js";

const TABS = [
  ["events", "Events", eventsPanel],
  ["times", "Step times", stepTimesPanel],
  ["plan", "Plan", planPanel],
  ["config", "Config", configPanel],
  ["checkpoints", "Checkpoints", checkpointsPanel],
  ["data", "Data", inputsPanel],
  ["rollouts", "Rollouts", rolloutsPanel],
  ["texts", "Texts", samplesPanel],
  ["log", "Log", logPanel],
];
const REFRESHED = ["events", "times", "checkpoints", "rollouts", "texts", "log"];
const REFRESH_MS = 4000;
const COMPUTING_MS = 1500;

export class Details {
  #shown = "";
  #timer = null;
  #number = 0;

  constructor(section, state, source, curves, runs) {
    Object.assign(this, { state, source, curves, runs });
    this.memory = { refresh: () => this.#load() };
    this.title = element("h2", { id: "details-title" }, "Details");
    this.facts = element("dl", { className: "facts-table" });
    this.note = element("p", { className: "status-note" });
    this.tabs = TABS.map(([key, title]) => {
      const tab = element("button", { type: "button", role: "tab", id: `tab-${key}`, "aria-controls": "panel" }, title);
      tab.addEventListener("click", () => this.state.set({ tab: key }));
      return tab;
    });
    this.tabList = element("div", { className: "tabs", role: "tablist", "aria-label": "Parts of the run" }, this.tabs);
    this.tabList.addEventListener("keydown", (event) => this.#onKey(event));
    this.panel = element("div", { id: "panel", role: "tabpanel", tabIndex: 0 });
    section.append(this.title, this.note, this.facts, this.tabList, this.panel);
  }

  /** Show what the state says. Fetches only if another run or part is chosen. */
  update() {
    const { state } = this;
    const run = this.runs.get(state.run);
    for (const each of [this.facts, this.tabList]) each.hidden = !run;
    this.#drawFacts(run);
    if (!run) {
      this.title.textContent = "Details";
      this.#shown = "";
      clearTimeout(this.#timer);
      this.panel.replaceChildren(
        emptyState(this.runs.size ? "Choose a run from the list." : "There is no run to show."),
      );
      this.panel.removeAttribute("aria-labelledby");
      return;
    }
    this.title.textContent = run.name;
    const active = TABS.some(([key]) => key === state.tab) ? state.tab : TABS[0][0];
    TABS.forEach(([key], index) => {
      this.tabs[index].setAttribute("aria-selected", key === active);
      this.tabs[index].tabIndex = key === active ? 0 : -1;
    });
    this.panel.setAttribute("aria-labelledby", `tab-${active}`);
    const wanted = JSON.stringify([
      run.name,
      active,
      active === "config" ? state.other : "",
      active === "plan" ? run.status : "",
    ]);
    if (wanted !== this.#shown) {
      this.#shown = wanted;
      this.active = active;
      this.#load();
    }
  }

  /** Colors have changed: draw again. */
  redraw() {
    this.#shown = "";
    this.update();
  }

  async #load() {
    clearTimeout(this.#timer);
    const number = ++this.#number;
    const name = this.state.run;
    const show = TABS.find(([key]) => key === this.active)[2];
    let content;
    try {
      content = await show({
        name,
        source: this.source,
        state: this.state,
        runs: this.runs,
        curves: this.curves,
        memory: this.memory,
      });
    } catch (error) {
      content = emptyState(`This could not be read: ${error.message}`);
    }
    if (number !== this.#number) return;
    this.#replace(content);
    if (!this.source.isLive) return;
    const isComputing = content.classList.contains("computing");
    const isRunning = this.runs.get(name)?.status === "running";
    if (isComputing || (isRunning && REFRESHED.includes(this.active))) {
      this.#timer = setTimeout(
        () => (document.hidden ? this.#wait() : this.#load()),
        isComputing ? COMPUTING_MS : REFRESH_MS,
      );
    }
  }

  #wait() {
    this.#timer = setTimeout(() => (document.hidden ? this.#wait() : this.#load()), REFRESH_MS);
  }

  /** Replace the panel unless nothing has changed or the user is inside of it. */
  #replace(content) {
    const isInside = this.panel.contains(document.activeElement) && document.activeElement !== this.panel;
    const isSame = this.panel.firstElementChild?.isEqualNode(content);
    const key = this.#shown;
    if (this.panel.dataset.key === key && (isSame || (isInside && this.active !== "log" && this.active !== "config")))
      return;
    this.panel.dataset.key = key;
    this.panel.replaceChildren(content);
  }

  #onKey(event) {
    const current = TABS.findIndex(([key]) => key === this.active);
    const target = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: 0, End: TABS.length - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    const index = (target + TABS.length) % TABS.length;
    this.state.set({ tab: TABS[index][0] });
    this.tabs[index].focus();
  }

  #drawFacts(run) {
    this.note.textContent = run?.note ?? "";
    this.note.hidden = !run?.note;
    if (!run) return;
    const facts = [
      ["Status", element("span", { className: `status ${run.status}` }, run.status)],
      ["Step", run.steps ? `${count(run.step ?? 0)} of ${count(run.steps)}` : count(run.step)],
      ["Loss", run.loss_text || significant(run.loss, 4)],
      ["Evaluation", significant(run.evaluation, 4)],
      ["Tokens/s", compact(run.tokens_per_second)],
      ["MFU", percent(run.mfu)],
      ["Started", dateTime(run.started)],
      ["Last written", dateTime(run.updated)],
      ["Device", run.device ? `${run.device}${run.ranks > 1 ? `, ${count(run.ranks)} ranks` : ""}` : "–"],
    ];
    this.facts.replaceChildren(
      ...facts.map(([title, value]) => element("div", {}, element("dt", {}, title), element("dd", {}, value))),
    );
  }
}
