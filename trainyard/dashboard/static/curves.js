// The charts of the selected runs, and the controls of all of them.

import { Chart } from "./chart.js";
import { DASHES, swatch } from "./chart_drawing.js";
import { Controls } from "./controls.js";
import { element, emptyState } from "./dom.js";
import { compact, count, percent, significant, tick } from "./format.js";
import { markText } from "./marks.js";
import { metricGroups, shortName } from "./metric_groups.js";
import { RunData, smooth } from "./run_data.js";
import { COLORS } from "./state.js";
import { colorOf } from "./theme.js";

const CHARTS = [
  { series: "loss", title: "Loss", digits: 4, empty: "No step has been logged yet." },
  {
    series: "evaluation",
    title: "Evaluation",
    digits: 4,
    showPoints: true,
    empty: "No evaluation yet (evaluate.every).",
  },
  { series: "grad_norm", title: "Gradient norm", digits: 3, empty: "No gradient norm has been logged." },
  { series: "lr", title: "Learning rate", digits: 3, empty: "No learning rate has been logged." },
  { series: "tokens_per_second", title: "Tokens per second", compact: true, empty: "No speed has been logged." },
  { series: "mfu", title: "MFU", percent: true, empty: "No MFU: the peak of this device is not known." },
];
const MARKED = ["loss", "grad_norm"];
const CURVES_POLL_MS = 2000;
const INDEXING_POLL_MS = 250;
const TIME_UNITS = [
  ["d", 86400],
  ["h", 3600],
  ["min", 60],
  ["s", 1],
];

export class Curves {
  #data = new Map();
  #pending = new Map();
  #timer = null;
  #evaluation = "evaluate/loss";
  #metricCharts = new Map();
  #colors = 0;
  #frame = null;

  constructor(section, state, slots, source, runs) {
    Object.assign(this, { section, state, slots, source, runs });
    this.charts = CHARTS.map((spec) => this.#newChart(spec));
    this.controls = new Controls(state, () => this.#zoom(null));
    this.legend = element("ul", { className: "legend", "aria-label": "Selected runs" });
    this.note = element("p", { className: "note", role: "status" });
    this.empty = emptyState("No run is selected: check one in the list.");
    this.grid = element(
      "div",
      { className: "charts" },
      this.charts.map((chart) => chart.figure),
    );
    section.append(
      element("h2", { id: "curves-title" }, "Curves"),
      this.controls.bar,
      this.legend,
      this.note,
      this.empty,
      this.grid,
    );
    this.evaluationChoice = element("select", { "aria-label": "Evaluation to show", hidden: true });
    this.evaluationChoice.addEventListener("change", () => {
      this.#evaluation = this.evaluationChoice.value;
      this.draw();
    });
    this.charts[1].extra.append(this.evaluationChoice);
  }

  #newChart(spec) {
    return new Chart({ ...spec, tick: tickText(spec), value: valueText(spec) }, (range) => this.#zoom(range));
  }

  /** The data of a run, for the panel of its events. */
  dataOf(name) {
    return this.#data.get(name);
  }

  /** Follow the selection: fetch what is missing, drop what is not selected any more. */
  async update() {
    const { state } = this;
    const known = state.runs.filter((name) => this.runs.has(name));
    this.slots.update(state.runs);
    for (const name of [...this.#data.keys()]) if (!known.includes(name)) this.#data.delete(name);
    this.#drawLegend(known);
    if (!known.length || known.some((name) => this.#data.has(name))) this.draw();
    await Promise.all(known.filter((name) => !this.#data.has(name)).map((name) => this.#fetch(name)));
    await new Promise((resolve) => requestAnimationFrame(resolve));
    this.#schedule();
  }

  recolor() {
    this.#colors += 1;
    this.draw();
  }

  /** Ask again for the runs that change. */
  #schedule() {
    if (!this.source.isLive) return;
    clearTimeout(this.#timer);
    const isIndexing = [...this.#data.values()].some((data) => !data.isComplete);
    this.#timer = setTimeout(
      async () => {
        if (!document.hidden) {
          const changing = [...this.#data].filter(
            ([name, data]) => !data.isComplete || this.runs.get(name)?.updated !== data.updated,
          );
          await Promise.all(changing.map(([name]) => this.#fetch(name)));
        }
        this.#schedule();
      },
      isIndexing ? INDEXING_POLL_MS : CURVES_POLL_MS,
    );
  }

  async #fetch(name) {
    if (this.#pending.has(name)) return this.#pending.get(name);
    const work = this.#fetchNow(name).finally(() => this.#pending.delete(name));
    this.#pending.set(name, work);
    return work;
  }

  async #fetchNow(name) {
    const data = this.#data.get(name) ?? new RunData();
    const { axis, range } = this.state;
    const updated = this.runs.get(name)?.updated;
    const buckets = Math.min(Math.max(Math.round((this.charts[0].area.clientWidth || 600) / 2), 150), 500);
    const query = { buckets, only_complete: data.columns.step.length && !data.isComplete && !range ? 1 : undefined };
    if (range) {
      const unit = axis === "time" ? this.view.factor : 1;
      const offset = axis === "time" ? data.start : 0;
      Object.assign(query, { axis, from: range[0] * unit + offset, to: range[1] * unit + offset });
    } else if (data.generation !== null && data.added < buckets && !data.isZoomed) {
      Object.assign(query, { after: data.count, generation: data.generation });
    }
    let answer;
    try {
      let events;
      [answer, events] = await Promise.all([this.source.curves(name, query), this.source.part(name, "events")]);
      if (this.state.range !== range) return;
      data.take(answer);
      data.isZoomed = Boolean(range);
      data.events = events;
      data.updated = updated;
      data.problem = "";
    } catch (error) {
      data.problem = error.message;
    }
    if (this.state.runs.includes(name)) {
      this.#data.set(name, data);
      if (answer?.columns) this.draw();
      else this.#drawNote(this.#shown());
    }
  }

  async #zoom(range) {
    this.state.range = range;
    this.draw();
    await Promise.all(
      [...this.#data.keys()].map((name) =>
        (this.#pending.get(name) ?? Promise.resolve()).then(() => this.#fetch(name)),
      ),
    );
    this.draw();
  }

  /** Draw with the next frame: several answers that arrive together are drawn once. */
  draw() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.#drawNow();
    });
  }

  #drawNow() {
    const { state } = this;
    const shown = this.#shown();
    const [unit, factor] = this.#unit(shown);
    this.view = {
      axis: state.axis,
      unit,
      factor,
      logX: state.logX,
      logY: state.logY,
      range: state.range,
      colors: `${this.#colors}`,
    };
    this.empty.hidden = shown.length > 0;
    this.grid.hidden = !shown.length;
    this.controls.draw(shown);
    this.#drawEvaluationChoice(shown);
    this.charts.forEach((chart, index) =>
      chart.draw(
        shown.map(([name, data]) => this.#line(name, data, CHARTS[index])),
        this.view,
      ),
    );
    this.#drawMetrics(shown);
    this.#drawNote(shown);
  }

  /** Charts of what only some runs log. Rewards are beside the loss. */
  #drawMetrics(shown) {
    const groups = metricGroups([...new Set(shown.flatMap(([, data]) => data.metricNames()))]);
    const charts = new Map();
    for (const group of groups) {
      const key = JSON.stringify(group);
      const spec = { ...group, digits: 3, empty: "No value has been logged." };
      charts.set(key, this.#metricCharts.get(key) ?? this.#newChart(spec));
    }
    for (const [key, chart] of this.#metricCharts) if (!charts.has(key)) chart.draw([], this.view);
    this.#metricCharts = charts;
    const isFirst = (chart) => chart.spec.isFirst;
    const [loss, ...common] = this.charts;
    const added = [...charts.values()];
    const all = [loss, ...added.filter(isFirst), ...common, ...added.filter((chart) => !isFirst(chart))];
    const figures = all.map((chart) => chart.figure);
    if (figures.some((figure, index) => this.grid.children[index] !== figure) || this.grid.children[figures.length])
      this.grid.replaceChildren(...figures);
    for (const chart of added) this.#drawMetricChart(chart, shown);
  }

  /** With one run, metrics differ by color; with several, runs do, and metrics differ by their dashes. */
  #drawMetricChart(chart, shown) {
    const { names } = chart.spec;
    const isAlone = shown.length === 1;
    const styleOf = (index) => (isAlone ? { slot: index, dash: 0 } : { dash: index });
    const lines = shown.flatMap(([run, data]) =>
      names
        .filter((series) => data.columns[series])
        .map((series) => ({
          ...this.#line(run, data, { series }),
          ...(names.length > 1 ? styleOf(names.indexOf(series)) : {}),
          name: names.length === 1 ? run : isAlone ? shortName(series) : `${run} ${shortName(series)}`,
        })),
    );
    chart.draw(lines, { ...this.view, logY: false }); // rewards and log-probabilities may be negative
    const keys = names.map((series, index) => {
      const color = colorOf(isAlone ? `--color-${index % COLORS}` : "--muted");
      const dash = DASHES[(isAlone ? Math.floor(index / COLORS) : index) % DASHES.length];
      return element("span", {}, swatch(color, dash), shortName(series));
    });
    chart.extra.className = "extra metric-key";
    chart.extra.replaceChildren(...(names.length > 1 ? keys : []));
  }

  #shown() {
    return this.state.runs.filter((name) => this.#data.has(name)).map((name) => [name, this.#data.get(name)]);
  }

  /** Unit of the time axis by its length, and seconds per unit. */
  #unit(shown) {
    if (this.state.axis !== "time") return ["", 1];
    const longest = Math.max(
      0,
      ...shown.map(([, data]) => (data.columns.time.findLast((value) => value !== null) ?? data.start) - data.start),
    );
    return TIME_UNITS.find(([, seconds]) => longest >= 2 * seconds) ?? TIME_UNITS.at(-1);
  }

  #line(name, data, { series }) {
    const { axis, logX, smoothing, range } = this.state;
    const { factor } = this.view;
    const scaled = ([x, y]) => [factor === 1 ? x : x.map((value) => value / factor), y];
    const isEvaluation = series === "evaluation";
    const points = scaled(
      isEvaluation ? data.evaluationPoints(this.#evaluation, axis, logX) : data.points(series, axis, logX),
    );
    const line = { name, slot: this.slots.of(name) ?? 0, dash: 0, points, smoothed: null, marks: [] };
    if (smoothing && !isEvaluation && points[0].length > 2) {
      const [x, y] = scaled(data.smoothPoints(series, axis, logX));
      const length = range ? range[1] - range[0] : x.at(-1) - x[0];
      line.smoothed = [x, smooth(x, y, Math.max(0.2 * (smoothing / 100) ** 2 * length, 1e-12))];
    }
    if (MARKED.includes(series)) {
      line.marks = data
        .marks()
        .map((mark) => ({
          kind: mark.event,
          x: data.xOfStep(mark.step, axis) / factor,
          text: markText(mark, this.state.pathOf(name)),
        }))
        .filter((mark) => Number.isFinite(mark.x));
    }
    return line;
  }

  #drawEvaluationChoice(shown) {
    const names = [...new Set(shown.flatMap(([, data]) => data.evaluationNames()))].sort();
    if (names.length && !names.includes(this.#evaluation)) this.#evaluation = names[0];
    this.evaluationChoice.hidden = names.length < 2;
    const current = [...this.evaluationChoice.options].map((option) => option.value);
    if (current.join() !== names.join()) {
      this.evaluationChoice.replaceChildren(
        ...names.map((name) => element("option", { value: name }, name.replace("evaluate/", ""))),
      );
    }
    this.evaluationChoice.value = this.#evaluation;
  }

  #drawLegend(names) {
    this.legend.replaceChildren(
      ...names.map((name) => {
        const item = element(
          "li",
          {},
          element("i", {}),
          element(
            "button",
            {
              type: "button",
              title: `Details of ${name}`,
              "aria-pressed": this.state.run === name,
              on: { click: () => this.state.set({ run: name }) },
            },
            name,
          ),
        );
        item.dataset.color = this.slots.of(name) % COLORS;
        return item;
      }),
    );
    this.legend.hidden = !names.length;
  }

  #drawNote(shown) {
    const missing = this.state.runs.filter((name) => !this.runs.has(name));
    const problems = shown.filter(([, data]) => data.problem).map(([name, data]) => `${name}: ${data.problem}`);
    const indexing = shown.filter(([, data]) => !data.isComplete);
    const progress = indexing.reduce((sum, [, data]) => sum + data.progress, 0) / indexing.length;
    const files = indexing.length > 1 ? `${count(indexing.length)} large files` : "a large file";
    const reading = `Reading ${files}, ${percent(progress)}; until then the curves show a sample of the steps.`;
    const texts = [
      ...missing.map((name) => `There is no run ${name}.`),
      ...problems,
      indexing.length ? reading : "",
    ].filter(Boolean);
    if (this.note.textContent !== texts.join(" ")) this.note.textContent = texts.join(" ");
  }
}

function tickText(spec) {
  return spec.percent ? (value) => `${tick(100 * value)} %` : tick;
}

function valueText(spec) {
  if (spec.percent) return percent;
  return spec.compact ? compact : (value) => significant(value, spec.digits);
}
