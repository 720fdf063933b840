// Numbers, sizes and times as text.

const SUFFIXES = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

/** Three significant digits with a suffix: 12.3k, 1.50M. */
export function compact(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  for (const [unit, suffix] of SUFFIXES) {
    if (size >= 0.9995 * unit) return significant(value / unit, 3) + suffix;
  }
  return significant(value, 3);
}

/** A number for the tick of an axis: up to three significant digits, no zeros at the end: 1.5k, 20, 0.002, 1e-4. */
export function tick(value) {
  const short = Number(value.toPrecision(3));
  const size = Math.abs(short);
  if (size === 0 || (size >= 1e-3 && size < 1e4)) return short.toLocaleString("en-US", { maximumFractionDigits: 6 });
  const [unit, suffix] = SUFFIXES.find(([least]) => size >= least) ?? [];
  return unit ? `${Number((short / unit).toPrecision(3))}${suffix}` : short.toExponential();
}

/** A number with `digits` significant digits and without an exponent unless it is very small or large. */
export function significant(value, digits) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(Number(value.toPrecision(digits))); // 0.9996 is 1.00, not 1.000
  if (size < 1e-3 || size >= 1e9) return value.toExponential(digits - 1).replace("e+", "e");
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(places, 12));
}

/** A position on an axis: whole numbers completely, others with six digits. */
export function exact(value) {
  return Number.isInteger(value) ? value.toLocaleString("en-US") : String(Number(significant(value, 6)));
}

export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en-US");
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${significant(100 * value, 3)} %`;
}

export function bytes(value) {
  if (value >= 2 ** 30) return `${significant(value / 2 ** 30, 3)} GiB`;
  if (value >= 2 ** 20) return `${significant(value / 2 ** 20, 3)} MiB`;
  if (value >= 2 ** 10) return `${significant(value / 2 ** 10, 3)} KiB`;
  return `${value} B`;
}

/** Date and time in the time zone of the reader. */
export function dateTime(seconds) {
  if (!seconds) return "–";
  const date = new Date(seconds * 1000);
  if (Number.isNaN(date.getTime())) return "–";
  const two = (number) => String(number).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

/** How long ago, in one unit: 5 s, 3 min, 2 h, 4 d. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const passed = Math.max(0, seconds);
  if (passed < 60) return `${Math.round(passed)} s`;
  if (passed < 3600) return `${Math.round(passed / 60)} min`;
  if (passed < 48 * 3600) return `${Math.round(passed / 3600)} h`;
  return `${Math.round(passed / 86400)} d`;
}
