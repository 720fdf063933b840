// The panels of a run's details. Each returns an element for the data that it fetches.

import { configTable } from "./config_diff.js";
import { commandLine, element, emptyState, table } from "./dom.js";
import { bytes, count, dateTime, percent, significant } from "./format.js";
import { heatMap } from "./heat_map.js";
import { numberText, shellWord, showCommand } from "./marks.js";

const MAX_SAMPLES = 16;
const EVENT_TITLES = { loss_spike: "Loss spike", not_finite: "Not finite", start: "Start", end: "End" };

export async function eventsPanel({ name, source, curves, state }) {
  const events = await source.part(name, "events");
  const data = curves.dataOf(name);
  const marks = data
    ? data.marks().filter((mark) => !events.some((event) => event.step === mark.step && event.event === mark.event))
    : [];
  const all = [...events, ...marks].reverse().sort((a, b) => b.step - a.step);
  if (!all.length) return emptyState("No events: no loss spike, and all steps were finite.");
  return element(
    "ol",
    { className: "events" },
    all.map((event) => eventItem(event, state.pathOf(name))),
  );
}

function eventItem(event, path) {
  const isMark = event.event === "loss_spike" || event.event === "not_finite";
  const rest = event.num_samples - Math.min(event.samples.length, MAX_SAMPLES);
  return element(
    "li",
    { className: event.event },
    element(
      "p",
      { className: "line" },
      element("b", {}, EVENT_TITLES[event.event]),
      ` at step ${count(event.step)}`,
      event.time ? element("time", {}, dateTime(event.time)) : null,
    ),
    element("p", {}, eventText(event)),
    event.samples.length
      ? element(
          "p",
          { className: "samples" },
          `Samples of the batch: ${event.samples.slice(0, MAX_SAMPLES).join(", ")}`,
          rest > 0 ? ` and ${count(rest)} more` : "",
        )
      : null,
    isMark ? commandLine(showCommand(event, path)) : null,
  );
}

function eventText(event) {
  if (event.event === "loss_spike")
    return `Loss ${numberText(event.loss)}; ${numberText(event.expected)} was expected.`;
  if (event.event === "not_finite") return event.reason ?? "";
  if (event.event === "end") return [event.outcome, event.error].filter(Boolean).join(": ");
  const place = [
    event.host && `on ${event.host}`,
    event.ranks && `${count(event.ranks)} ${event.ranks === 1 ? "rank" : "ranks"}`,
    event.device,
  ].filter(Boolean);
  return `${event.resumed ? "Resumed" : "Started"} ${place.join(", ")}`;
}

export async function stepTimesPanel({ name, source }) {
  const data = await source.part(name, "step-times");
  if (!data.rows.length) return emptyState("No step times by rank: this run has no span files.");
  const rows = data.slowest.map((each) => [String(each.rank), significant(each.ms, 4), `${each.ratio.toFixed(2)} ×`]);
  return element(
    "div",
    {},
    heatMap(data),
    element("h4", {}, "Slowest ranks"),
    table(
      "Slowest ranks",
      [
        { title: "rank", number: true },
        { title: "median ms", number: true },
        { title: "of the median rank", number: true },
      ],
      rows,
    ),
  );
}

export async function planPanel({ name, source, state }) {
  const plan = await source.part(name, "plan");
  if (plan.state === "computing") {
    return element("p", { className: "computing", role: "status" }, "Computing the plan. This takes some seconds.");
  }
  if (plan.problem) return emptyState(plan.problem, `trainyard plan ${shellWord(state.pathOf(name))}`);
  const rows = plan.rows.map((row) => [
    row.name,
    significant(row.predicted, 3),
    significant(row.measured, 3),
    row.ratio.toFixed(2),
  ]);
  const parts = Object.entries(plan.parts).sort((a, b) => b[1] - a[1]);
  return element(
    "div",
    {},
    element("p", {}, `${plan.hardware}; ${plan.layout}`),
    table(
      "Plan and measurement",
      [
        { title: "" },
        { title: "predicted", number: true },
        { title: "measured", number: true },
        { title: "ratio", number: true },
      ],
      rows,
    ),
    element("h4", {}, "Predicted shares of a step"),
    element(
      "dl",
      { className: "bars" },
      parts.flatMap(([part, share]) => bar(part, share)),
    ),
    element("p", { className: "note" }, `Limit: ${plan.bottleneck}`),
  );
}

function bar(title, share) {
  const fill = element("i", {});
  fill.style.width = `${Math.max(100 * share, 0.5)}%`;
  return [
    element("dt", {}, title),
    element("dd", {}, element("span", { className: "track" }, fill), element("span", {}, percent(share))),
  ];
}

export async function configPanel({ name, source, state, runs }) {
  const others = [...runs.keys()].filter((other) => other !== name).sort();
  const otherName = others.includes(state.other) ? state.other : "";
  const [config, other] = await Promise.all([
    source.part(name, "config"),
    otherName ? source.part(otherName, "config") : null,
  ]);
  const choice = element(
    "select",
    {},
    element("option", { value: "" }, "no other run"),
    others.map((each) => element("option", { value: each, selected: each === otherName }, each)),
  );
  choice.addEventListener("change", () => state.set({ other: choice.value }));
  const all = element("input", { type: "checkbox" });
  const place = element("div", {}, configTable(name, config, otherName, other, false));
  all.addEventListener("change", () => place.replaceChildren(configTable(name, config, otherName, other, all.checked)));
  const tools = element(
    "div",
    { className: "tools" },
    element("label", {}, "Compare with ", choice),
    other ? element("label", { className: "check" }, all, "Equal keys too") : null,
  );
  return element("div", {}, others.length ? tools : null, place);
}

export async function checkpointsPanel({ name, source }) {
  const found = await source.part(name, "checkpoints");
  if (!found.length) return emptyState("No checkpoints in the run directory (checkpoint.every, checkpoint.directory).");
  return table(
    "Checkpoints",
    [
      { title: "step", number: true },
      { title: "size", number: true },
      { title: "files", number: true },
      { title: "written" },
      { title: "path" },
    ],
    found.map((each) => [
      count(each.step),
      bytes(each.bytes),
      count(each.files),
      each.is_complete ? dateTime(each.time) : "incomplete",
      element("code", {}, each.path),
    ]),
  );
}

/** The end of a log file. It continues where it was, and follows the end unless the user has scrolled up. */
export async function logPanel({ name, source, memory }) {
  const files = await source.part(name, "logs");
  if (!files.length) {
    return emptyState(
      "No logs in the run directory: runs started by hand log to their terminal. Jobs keep theirs:",
      "trainyard submit my.yaml",
    );
  }
  const latest = files.reduce((a, b) => (b.time > a.time ? b : a));
  const file = files.some((each) => each.file === memory.file) ? memory.file : latest.file;
  const isSame = memory.file === file && memory.name === name;
  const answer = await source.log(name, file, isSame ? memory.offset : undefined);
  const text = isSame && answer.is_addition ? (memory.text + answer.text).slice(-200000) : answer.text;
  Object.assign(memory, { name, file, text, offset: answer.next_offset });
  const choice = element(
    "select",
    {},
    files.map((each) =>
      element("option", { value: each.file, selected: each.file === file }, `${each.file} (${bytes(each.bytes)})`),
    ),
  );
  choice.addEventListener("change", () => {
    memory.file = choice.value;
    memory.offset = undefined;
    memory.refresh();
  });
  const output = element(
    "pre",
    { className: "log", tabIndex: 0, role: "region", "aria-label": `End of ${file}` },
    text || "(empty)",
  );
  const isAtEnd =
    !memory.output || memory.output.scrollTop + memory.output.clientHeight >= memory.output.scrollHeight - 8;
  const scrolled = memory.output?.scrollTop ?? 0;
  memory.output = output;
  requestAnimationFrame(() => (output.scrollTop = isAtEnd || !isSame ? output.scrollHeight : scrolled));
  return element("div", {}, element("div", { className: "tools" }, element("label", {}, "File ", choice)), output);
}
