// What the user has chosen. It is kept in the address, so that a reload or a link shows the same.

export const COLORS = 8;
const DEFAULTS = { runs: [], axis: "step", smoothing: 0, logX: false, logY: false, run: "", tab: "events", other: "" };
const AXES = ["step", "tokens", "time"];

export class State {
  #listeners = [];

  constructor() {
    Object.assign(this, structuredClone(DEFAULTS));
    this.range = null; // part of the x axis that is shown: [from, to], null: everything
    this.root = ""; // the directory of the runs, as the user named it
    this.isChosen = this.#read();
    addEventListener("hashchange", () => {
      this.#read();
      this.#notify();
    });
  }

  /** The path of a run, for commands. */
  pathOf(name) {
    return this.root ? `${this.root}/${name}` : name;
  }

  /** Call `listener` after every change. */
  onChange(listener) {
    this.#listeners.push(listener);
  }

  set(changes) {
    Object.assign(this, changes);
    if ("runs" in changes) this.isChosen = true;
    if ("axis" in changes) this.range = null;
    this.#write();
    this.#notify();
  }

  toggleRun(name) {
    const runs = this.runs.includes(name) ? this.runs.filter((each) => each !== name) : [...this.runs, name];
    this.set({ runs, run: runs.includes(this.run) ? this.run : (runs.at(-1) ?? "") });
  }

  #notify() {
    for (const listener of this.#listeners) listener();
  }

  #read() {
    const given = new URLSearchParams(location.hash.slice(1));
    if (!given.has("runs")) return false;
    const smoothing = Number(given.get("smoothing"));
    Object.assign(this, {
      runs: given.getAll("runs").filter(Boolean),
      axis: AXES.includes(given.get("axis")) ? given.get("axis") : DEFAULTS.axis,
      smoothing: smoothing >= 0 && smoothing <= 100 ? smoothing : 0,
      logX: given.has("logX"),
      logY: given.has("logY"),
      run: given.get("run") ?? "",
      tab: given.get("tab") ?? DEFAULTS.tab,
      other: given.get("other") ?? "",
    });
    return true;
  }

  #write() {
    const shown = new URLSearchParams();
    for (const name of this.runs.length ? this.runs : [""]) shown.append("runs", name);
    for (const name of ["axis", "smoothing", "run", "tab", "other"]) {
      if (this[name] !== DEFAULTS[name]) shown.set(name, this[name]);
    }
    for (const name of ["logX", "logY"]) if (this[name]) shown.set(name, "1");
    history.replaceState(null, "", `#${shown}`);
  }
}

/** The number of a run's color: the first one that no other selected run has. */
export class ColorSlots {
  #slots = new Map();

  update(names) {
    for (const name of [...this.#slots.keys()]) if (!names.includes(name)) this.#slots.delete(name);
    for (const name of names) {
      if (this.#slots.has(name)) continue;
      const used = new Set(this.#slots.values());
      let slot = 0;
      while (used.has(slot)) slot += 1;
      this.#slots.set(name, slot);
    }
  }

  of(name) {
    return this.#slots.get(name);
  }
}
