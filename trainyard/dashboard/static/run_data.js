// The numbers of one run as the charts need them, and how they are smoothed.

const COMMON = ["step", "tokens", "time", "loss", "grad_norm", "tokens_per_second", "mfu", "lr"];

/** What the server has sent about a run's curves so far. */
export class RunData {
  columns = { step: [], tokens: [], time: [] };
  means = null;
  evaluations = [];
  notFinite = [];
  events = [];
  generation = null;
  count = 0;
  added = 0;
  isComplete = false;
  progress = 0;

  take(answer) {
    this.isComplete = answer.is_complete;
    this.progress = answer.progress;
    if (!answer.columns) return;
    if (answer.is_addition) {
      for (const [name, values] of Object.entries(answer.columns)) this.columns[name].push(...values);
      this.added += answer.columns.step.length;
    } else {
      this.columns = answer.columns;
      this.means = answer.means ?? null;
      this.added = 0;
    }
    this.evaluations = answer.evaluations;
    this.notFinite = answer.not_finite;
    this.generation = answer.generation >= 0 ? answer.generation : null;
    this.count = answer.count;
  }

  hasAxis(axis) {
    return this.columns[axis].some((value) => value !== null);
  }

  get start() {
    return this.columns.time.find((value) => value !== null) ?? 0;
  }

  /** Points of a series as [x values, y values], without those that have no x. */
  points(series, axis, logX) {
    return this.#pairs(this.columns, series, axis, logX);
  }

  /** Points to smooth: means of buckets where the server has left out rows, and the rows that came later. */
  smoothPoints(series, axis, logX) {
    if (!this.means) return this.points(series, axis, logX);
    const [x, y] = this.#pairs(this.means, series, axis, logX);
    if (!this.added) return [x, y];
    const tail = {};
    for (const name of ["step", "tokens", "time", series]) tail[name] = this.columns[name].slice(-this.added);
    const [laterX, laterY] = this.#pairs(tail, series, axis, logX);
    return [x.concat(laterX), y.concat(laterY)];
  }

  #pairs(columns, series, axis, logX) {
    const x = [];
    const y = [];
    const offset = axis === "time" ? this.start : 0;
    const given = columns[series] ?? [];
    for (let index = 0; index < given.length; index += 1) {
      const at = columns[axis][index];
      if (at === null || (logX && at - offset <= 0)) continue;
      x.push(at - offset);
      y.push(given[index]);
    }
    return [x, y];
  }

  /** Names of the columns that not all runs have, such as rewards/chosen. */
  metricNames() {
    return Object.keys(this.columns).filter((name) => !COMMON.includes(name));
  }

  /** Names of the evaluations, such as evaluate/loss. */
  evaluationNames() {
    const names = new Set();
    for (const record of this.evaluations) for (const name of Object.keys(record)) if (name !== "step") names.add(name);
    return [...names];
  }

  evaluationPoints(name, axis, logX) {
    const x = [];
    const y = [];
    for (const record of this.evaluations) {
      const at = this.xOfStep(record.step, axis);
      if (at === null || (logX && at <= 0) || record[name] === undefined) continue;
      x.push(at);
      y.push(record[name]);
    }
    return [x, y];
  }

  /** The position of a step on an axis, between the two rows around it. */
  xOfStep(step, axis) {
    if (axis === "step") return step;
    const steps = this.columns.step;
    const values = this.columns[axis];
    if (!steps.length) return null;
    const after = lowerBound(steps, step);
    const [left, right] = [Math.max(after - 1, 0), Math.min(after, steps.length - 1)];
    if (values[left] === null || values[right] === null) return null;
    const offset = axis === "time" ? this.start : 0;
    const width = steps[right] - steps[left];
    const share = width > 0 ? Math.min(Math.max((step - steps[left]) / width, 0), 1) : 0;
    return values[left] + share * (values[right] - values[left]) - offset;
  }

  /** Steps to mark: loss spikes and steps that were not finite. */
  marks() {
    const fromEvents = this.events.filter((event) => event.event === "loss_spike" || event.event === "not_finite");
    const known = new Set(fromEvents.map((event) => event.step));
    const others = this.notFinite.filter((each) => !known.has(each.step));
    return [
      ...fromEvents,
      ...others.map((each) => ({ event: "not_finite", samples: [], num_samples: 0, ...each })),
    ].sort((a, b) => a.step - b.step);
  }
}

/** The first index whose value is at least `target`, in ascending values. */
export function lowerBound(values, target) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < target) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The index of the value nearest to `target`; -1 if there is none. */
export function nearest(values, target) {
  if (!values.length) return -1;
  const after = Math.min(lowerBound(values, target), values.length - 1);
  return after > 0 && target - values[after - 1] < values[after] - target ? after - 1 : after;
}

/** A weighted mean of the points on both sides of each one. Weights fall by 1/e over `width` on the x axis, so that
 * uneven distances do not matter and the curve does not lag. */
export function smooth(x, y, width) {
  const sums = new Float64Array(y.length);
  const weights = new Float64Array(y.length);
  const pass = (from, to, step) => {
    let [sum, weight, last] = [0, 0, x[from]];
    for (let index = from; index !== to; index += step) {
      const kept = Math.exp(-Math.abs(x[index] - last) / width);
      last = x[index];
      sums[index] += sum * kept;
      weights[index] += weight * kept;
      const own = y[index] === null ? 0 : 1;
      sum = sum * kept + own * (y[index] ?? 0);
      weight = weight * kept + own;
    }
  };
  pass(0, y.length, 1);
  pass(y.length - 1, -1, -1);
  return y.map((value, index) => (value === null ? null : (sums[index] + value) / (weights[index] + 1)));
}
