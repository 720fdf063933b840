// Step time by rank and step as colors: a slow rank is a bright row, a pause of all ranks a bright column.

import { element } from "./dom.js";
import { count, significant } from "./format.js";
import { colorOf } from "./theme.js";

const ROW_HEIGHT = [6, 22]; // pixels; few ranks have tall rows
const LABEL_WIDTH = 64;
const AXIS_HEIGHT = 22;
const TOP = 6; // pixels above the first row, for its label

/** An element that draws `data`: ranks of each row, edges of the columns in steps, milliseconds. */
export function heatMap(data) {
  const canvas = element("canvas", { className: "heat", tabIndex: 0, role: "img" });
  const readout = element("p", { className: "note", "aria-live": "polite" });
  const values = data.rows
    .flat()
    .filter((value) => value !== null)
    .sort((a, b) => a - b);
  // The slowest percent of the cells shares one color, so that one long pause does not hide all else.
  const low = values[Math.floor(0.01 * values.length)];
  const high = Math.max(values[Math.floor(0.99 * (values.length - 1))], low * 1.05);
  const typical = values[values.length >> 1];
  const describe = `${significant(low, 3)} to ${significant(high, 3)} ms, typically ${significant(typical, 3)} ms`;
  canvas.setAttribute("aria-label", `Step time by rank and step: ${describe}. Arrow keys read cells.`);
  readout.textContent = describe;
  const rowHeight = Math.min(Math.max(Math.floor(260 / data.rows.length), ROW_HEIGHT[0]), ROW_HEIGHT[1]);
  const columns = data.edges.length - 1;
  const cursor = { row: 0, column: -1 };
  let cellWidth = 1;

  const draw = () => {
    const width = canvas.parentElement?.clientWidth ?? 0;
    if (!width) return;
    const height = TOP + data.rows.length * rowHeight + AXIS_HEIGHT;
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    canvas.style.height = `${height}px`;
    cellWidth = (width - LABEL_WIDTH) / columns;
    const ctx = canvas.getContext("2d");
    ctx.scale(devicePixelRatio, devicePixelRatio);
    ctx.translate(0, TOP);
    const [cold, hot, text] = [colorOf("--heat-low"), colorOf("--heat-high"), colorOf("--muted")];
    ctx.font = "12px system-ui, sans-serif";
    data.rows.forEach((row, index) => {
      row.forEach((value, column) => {
        if (value === null) return;
        const share = Math.min(Math.max((value - low) / (high - low), 0), 1);
        ctx.fillStyle = mix(cold, hot, share);
        ctx.fillRect(
          LABEL_WIDTH + column * cellWidth,
          index * rowHeight,
          cellWidth + 0.5,
          rowHeight - (rowHeight > 8 ? 1 : 0),
        );
      });
      if (rowHeight >= 12 || index % Math.ceil(14 / rowHeight) === 0) {
        ctx.fillStyle = text;
        ctx.textBaseline = "middle";
        ctx.fillText(rankText(data.ranks[index], true), 0, index * rowHeight + rowHeight / 2);
      }
    });
    ctx.fillStyle = text;
    ctx.textBaseline = "top";
    const y = data.rows.length * rowHeight + 6;
    ctx.fillText(`step ${count(data.edges[0])}`, LABEL_WIDTH, y);
    ctx.textAlign = "right";
    ctx.fillText(count(data.edges.at(-1) - 1), width, y);
    if (cursor.column >= 0) {
      ctx.strokeStyle = colorOf("--text");
      ctx.lineWidth = 2;
      ctx.strokeRect(
        LABEL_WIDTH + cursor.column * cellWidth,
        cursor.row * rowHeight,
        Math.max(cellWidth, 3),
        rowHeight,
      );
    }
  };
  const read = (row, column) => {
    if (row < 0 || row >= data.rows.length || column < 0 || column >= columns) return;
    Object.assign(cursor, { row, column });
    const [first, last] = [data.edges[column], data.edges[column + 1] - 1];
    const steps = first === last ? `step ${count(first)}` : `steps ${count(first)} to ${count(last)}`;
    const value = data.rows[row][column];
    const text = value === null ? "no span" : `${significant(value, 4)} ms`;
    readout.textContent = `${rankText(data.ranks[row])}, ${steps}: ${text}`;
    draw();
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    read(
      Math.floor((event.clientY - box.top - TOP) / rowHeight),
      Math.floor((event.clientX - box.left - LABEL_WIDTH) / cellWidth),
    );
  });
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    read(cursor.row + moves[event.key][0], Math.max(cursor.column + moves[event.key][1], 0));
  });
  new ResizeObserver(draw).observe(canvas);
  return element("div", { className: "heat-map" }, canvas, readout);
}

function rankText([first, last], isShort) {
  return first === last ? `rank ${first}` : `${isShort ? "" : "ranks "}${first}–${last}`;
}

/** A color between two of the form rgb(r, g, b). */
function mix(from, to, share) {
  const [a, b] = [from, to].map((color) => color.match(/[\d.]+/g).map(Number));
  return `rgb(${a
    .slice(0, 3)
    .map((value, index) => Math.round(value + share * (b[index] - value)))
    .join(" ")})`;
}
