// One chart of one or several quantities, with a line for each of every run, drawn by uPlot.

import { DASHES, LOG_AXIS, drawCross, drawTriangle, swatch, yRange } from "./chart_drawing.js";
import { announce, element } from "./dom.js";
import { exact, tick } from "./format.js";
import { lowerBound, nearest } from "./run_data.js";
import { COLORS } from "./state.js";
import { colorOf } from "./theme.js";

const HEIGHT = 220;
const MARK_DISTANCE = 8; // pixels from the cursor at which a mark is described

export class Chart {
  #plot = null;
  #lines = [];
  #key = "";

  constructor(spec, onZoom) {
    this.spec = spec;
    this.onZoom = onZoom;
    this.tooltip = element("div", { className: "tooltip", hidden: true });
    this.area = element("div", {
      className: "plot",
      tabIndex: 0,
      role: "application",
      "aria-roledescription": "chart",
      "aria-label": `${spec.title}: arrow keys read values, plus and minus zoom, zero shows everything`,
    });
    this.empty = element("p", { className: "empty-chart" });
    this.key = element("span", { className: "mark-key", hidden: true }, "▼ spike  ✕ not finite");
    this.extra = element("span", { className: "extra" }, this.key);
    this.figure = element(
      "figure",
      { className: "chart" },
      element("figcaption", {}, element("h3", {}, spec.title), this.extra),
      this.area,
      this.empty,
    );
    this.area.append(this.tooltip);
    this.area.addEventListener("keydown", (event) => this.#onKey(event));
    this.area.addEventListener("blur", () => this.#hideTooltip());
    new ResizeObserver(() => this.#resize()).observe(this.area);
  }

  /** Draw `lines`: {name, slot, dash, points, smoothed, marks}; dash is the number of a pattern. `view` has axis, unit,
   * logX, logY and range. */
  draw(lines, view) {
    this.#lines = lines;
    this.view = view;
    const hasPoints = lines.some((line) => line.points[1].some((value) => value !== null));
    this.area.hidden = !hasPoints;
    this.empty.hidden = hasPoints;
    this.empty.textContent = this.spec.empty;
    this.key.hidden = !lines.some((line) => line.marks.length);
    if (!hasPoints) {
      this.#destroy();
      return;
    }
    const tables = lines.flatMap((line) => (line.smoothed ? [line.points, line.smoothed] : [line.points]));
    const data =
      tables.length > 1
        ? uPlot.join(tables.map(([x, y]) => [x, this.#positive(y)]))
        : [tables[0][0], this.#positive(tables[0][1])];
    const key = JSON.stringify([
      lines.map((line) => [line.name, line.slot, line.dash, Boolean(line.smoothed)]),
      view.axis,
      view.unit,
      view.logX,
      view.logY,
      view.colors,
    ]);
    if (this.#plot && key === this.#key) {
      this.#plot.setData(data, false);
      this.#setRange();
      return;
    }
    this.#destroy();
    this.#key = key;
    this.#plot = new uPlot(this.#options(), data, this.area);
    this.#setRange();
  }

  #positive(values) {
    return this.view.logY ? values.map((value) => (value !== null && value > 0 ? value : null)) : values;
  }

  #destroy() {
    this.#plot?.destroy();
    this.#plot = null;
    this.#key = "";
  }

  #setRange() {
    const x = this.#plot.data[0];
    const [low, high] = this.view.range ?? [x[0], x.at(-1)];
    this.#plot.batch(() => {
      this.#plot.setScale(
        "x",
        low < high ? { min: low, max: high } : { min: low * 0.9 - (low <= 0), max: low * 1.1 + 1 },
      );
    });
    this.#plot.redraw(true, true);
  }

  #resize() {
    const width = this.area.clientWidth;
    if (this.#plot && width && width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
  }

  #options() {
    const { axis, unit, logX, logY } = this.view;
    const [text, grid] = [colorOf("--muted"), colorOf("--line")];
    const style = {
      stroke: text,
      font: "12px system-ui, sans-serif",
      grid: { stroke: grid, width: 1 },
      ticks: { show: false },
    };
    const series = [{}];
    for (const line of this.#lines) {
      const stroke = colorOf(`--color-${line.slot % COLORS}`);
      const dash = DASHES[(line.dash + (line.slot >= COLORS ? 1 : 0)) % DASHES.length];
      const few = line.points[0].length < 3;
      const common = { stroke, dash, width: 1.5, spanGaps: true };
      if (line.smoothed) {
        series.push({ ...common, width: 1, alpha: 0.3, points: { show: false } });
        series.push({ ...common, width: 2, points: { show: false } });
      } else {
        series.push({ ...common, points: { show: this.spec.showPoints || few, size: 5, fill: stroke } });
      }
    }
    return {
      width: this.area.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      padding: [8, 22, 0, 0],
      pxAlign: false,
      cursor: {
        sync: { key: `curves-${axis}`, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        drag: { x: true, y: false, setScale: false },
        points: { show: false },
        focus: { prox: -1 },
      },
      scales: {
        x: { time: false, distr: logX ? 3 : 1, range: (plot, low, high) => (low === null ? [1, 10] : [low, high]) },
        y: { distr: logY ? 3 : 1, range: (plot, low, high) => yRange(low, high, logY) },
      },
      axes: [
        {
          ...style,
          ...(logX ? LOG_AXIS : {}),
          size: 26,
          space: 70,
          values: (plot, values) => values.map((value) => (value === null ? "" : tick(value))),
          label: unit ? `${axis}, ${unit}` : axis,
          labelSize: 18,
          labelFont: "12px system-ui, sans-serif",
          labelGap: 0,
        },
        {
          ...style,
          ...(logY ? LOG_AXIS : {}),
          size: 52,
          values: (plot, values) => values.map((value) => (value === null ? "" : this.spec.tick(value))),
        },
      ],
      series,
      hooks: {
        setCursor: [(plot) => this.#onCursor(plot)],
        setSelect: [(plot) => this.#onSelect(plot)],
        draw: [(plot) => this.#drawMarks(plot)],
      },
    };
  }

  #onSelect(plot) {
    if (plot.select.width < 4) return;
    const low = plot.posToVal(plot.select.left, "x");
    const high = plot.posToVal(plot.select.left + plot.select.width, "x");
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.onZoom([low, high]);
  }

  #onKey(event) {
    const plot = this.#plot;
    if (!plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const x = this.#lines.find((line) => line.points[0].length)?.points[0] ?? [];
    const { min, max } = plot.scales.x;
    const center = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : (min + max) / 2;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity };
    if (event.key in moves) {
      const last = lowerBound(x, max + Number.EPSILON);
      const index = Math.min(
        Math.max(nearest(x, center) + moves[event.key], lowerBound(x, min)),
        Math.min(last, x.length - 1),
      );
      plot.setCursor({ left: plot.valToPos(x[index], "x"), top: 10 });
      announce(this.tooltip.textContent);
    } else if (event.key === "+" || event.key === "=") {
      this.onZoom([center - (center - min) / 2, center + (max - center) / 2]);
    } else if (event.key === "-") {
      this.onZoom([center - (center - min) * 2, center + (max - center) * 2]);
    } else if (event.key === "0" || event.key === "Escape") {
      this.onZoom(null);
    } else {
      return;
    }
    event.preventDefault();
  }

  /** Describe the values at the cursor, and the marks near it. */
  #onCursor(plot) {
    const isHere = this.area.matches(":hover") || this.area === document.activeElement;
    if (plot.cursor.left === null || plot.cursor.left < 0 || !isHere) {
      this.#hideTooltip();
      return;
    }
    const at = plot.posToVal(plot.cursor.left, "x");
    const near = 0.03 * (plot.scales.x.max - plot.scales.x.min);
    const rows = [];
    let shown = at;
    for (const line of this.#lines) {
      const [x, y] = line.smoothed ?? line.points;
      const index = nearest(x, at);
      if (index < 0 || y[index] === null || Math.abs(x[index] - at) > near) continue;
      shown = x[index];
      rows.push(
        element("p", {}, swatch(colorOf(`--color-${line.slot % COLORS}`)), element("span", {}, line.name), element("b", {}, ` ${this.spec.value(y[index])} `)),
      );
    }
    const marks = this.#lines.flatMap((line) =>
      line.marks
        .filter((mark) => Math.abs(plot.valToPos(mark.x, "x") - plot.cursor.left) < MARK_DISTANCE)
        .slice(0, 2)
        .map((mark) => element("p", { className: "mark" }, `${line.name}: ${mark.text}`)),
    );
    const head = element(
      "p",
      { className: "at" },
      `${this.view.axis} ${exact(shown)}${this.view.unit ? ` ${this.view.unit}` : ""} `,
    );
    this.tooltip.replaceChildren(head, ...rows, ...marks.slice(0, 3));
    this.tooltip.hidden = !rows.length;
    const left = plot.cursor.left + plot.bbox.left / devicePixelRatio;
    const isRight = left > this.area.clientWidth / 2;
    this.tooltip.style.left = isRight ? "" : `${left + 12}px`;
    this.tooltip.style.right = isRight ? `${this.area.clientWidth - left + 12}px` : "";
  }

  #hideTooltip() {
    this.tooltip.hidden = true;
  }

  /** A triangle at each loss spike; a line with a cross at each step that was not finite. */
  #drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - 8, bbox.width + 8, bbox.height + 8);
    ctx.clip();
    for (const line of this.#lines) {
      ctx.strokeStyle = ctx.fillStyle = colorOf("--failed");
      ctx.lineWidth = 1.5 * devicePixelRatio;
      for (const mark of line.marks) {
        const x = plot.valToPos(mark.x, "x", true);
        if (mark.kind === "not_finite") drawCross(ctx, x, bbox.top + 6 * devicePixelRatio, bbox.top + bbox.height);
        else {
          const [xs, ys] = line.points;
          const value = ys[nearest(xs, mark.x)];
          const y = value === null || value === undefined ? bbox.top + 8 : plot.valToPos(value, "y", true);
          drawTriangle(ctx, x, Math.max(y, bbox.top + 4));
        }
      }
    }
    ctx.restore();
  }
}
