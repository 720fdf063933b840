// Starts the page: the list of runs, the curves and the details, and the clock that asks for changes.

import { Curves } from "./curves.js";
import { Details } from "./details.js";
import { RunList } from "./run_list.js";
import { createSource } from "./source.js";
import { ColorSlots, State } from "./state.js";
import { startTheme } from "./theme.js";

const POLL_MS = 2000;
const SELECTED_AT_START = 3;

function start() {
  const [source, state, slots] = [createSource(), new State(), new ColorSlots()];
  const section = (id) => document.getElementById(id);
  const list = new RunList(section("runs"), state, slots);
  const curves = new Curves(section("curves"), state, slots, source, list.runs);
  const details = new Details(section("details"), state, source, curves, list.runs);
  const connection = section("connection");
  let version;

  const update = () => {
    const work = curves.update();
    list.draw();
    details.update();
    return work;
  };

  const poll = async () => {
    if (!document.hidden || version === undefined) {
      try {
        const answer = await source.runs(version);
        const isFirst = version === undefined;
        version = answer.version;
        state.root = answer.root;
        section("place").textContent = answer.root;
        connection.textContent = source.isLive ? "" : answer.written;
        connection.className = "";
        list.update(answer);
        if (!state.isChosen && list.runs.size && !state.runs.length) {
          const latest = source.isLive ? list.latest(SELECTED_AT_START) : answer.names;
          Object.assign(state, { runs: latest, run: latest[0], other: source.isLive ? "" : (latest[1] ?? "") });
          if (!source.isLive && latest[1]) state.tab = "config";
          await update();
        } else if (isFirst) {
          await update();
        } else if (answer.runs.length) {
          details.update();
        }
        document.documentElement.dataset.ready = "yes";
      } catch (error) {
        connection.textContent = `The server does not answer; trying again (${error.message})`;
        connection.className = "problem";
      }
    }
    if (source.isLive) setTimeout(poll, POLL_MS);
  };

  state.onChange(update);
  startTheme(section("theme"), () => {
    curves.recolor();
    details.redraw();
  });
  poll();
}

start();
