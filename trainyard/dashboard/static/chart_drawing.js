// Ticks, ranges, lines and marks of a chart.

import { element } from "./dom.js";

/** Patterns of lines, in pixels that are drawn and left out. */
export const DASHES = [undefined, [6, 4], [2, 3], [10, 3, 2, 3]];

/** A piece of a line for a key. */
export function swatch(color, dash) {
  const piece = element("i", {});
  let at = 0;
  const stops = (dash ?? []).flatMap((length, index) => {
    const stop = `${index % 2 ? "transparent" : color} ${at}px ${at + length}px`;
    at += length;
    return [stop];
  });
  piece.style.background = dash ? `repeating-linear-gradient(90deg, ${stops.join()})` : color;
  return piece;
}

/** Options of a logarithmic axis of uPlot. */
export const LOG_AXIS = { splits: (plot, index, low, high) => logTicks(low, high), filter: (plot, splits) => splits };

/** Ticks of a logarithmic axis: a few round numbers if it is short, otherwise 1, 2, 5 or only powers of ten. */
function logTicks(low, high) {
  if (!(low > 0) || !(high > low)) return [low];
  const decades = Math.log10(high / low);
  const ticks = [];
  if (decades < 0.7) {
    const rough = (high - low) / 4;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
    for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(Number(tick.toPrecision(6)));
    return ticks;
  }
  for (let exponent = Math.floor(Math.log10(low)); exponent <= Math.log10(high); exponent += 1) {
    for (const factor of decades < 2.5 ? [1, 2, 5] : [1]) {
      const tick = Number((factor * 10 ** exponent).toPrecision(6));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

export function drawTriangle(ctx, x, y) {
  const size = 5 * devicePixelRatio;
  ctx.beginPath();
  ctx.moveTo(x, y - 1);
  ctx.lineTo(x - size, y - 2 * size);
  ctx.lineTo(x + size, y - 2 * size);
  ctx.closePath();
  ctx.fill();
}

export function drawCross(ctx, x, y, bottom) {
  const size = 4 * devicePixelRatio;
  ctx.beginPath();
  ctx.moveTo(x - size, y - size);
  ctx.lineTo(x + size, y + size);
  ctx.moveTo(x + size, y - size);
  ctx.lineTo(x - size, y + size);
  ctx.stroke();
  ctx.globalAlpha = 0.35;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(x, y + size);
  ctx.lineTo(x, bottom);
  ctx.stroke();
  ctx.setLineDash([]);
  ctx.globalAlpha = 1;
}

export function yRange(low, high, isLog) {
  if (low === null || high === null) return [1, 10];
  if (isLog) return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.03, high * (high / low) ** 0.05];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const margin = 0.06 * (high - low);
  return [low >= 0 ? Math.max(low - margin, 0) : low - margin, high + margin];
}
