// Texts about steps that are marked on the curves.

import { count, significant } from "./format.js";

/** What happened at a marked step, and the command that shows its data. */
export function markText(mark, path) {
  const what =
    mark.event === "loss_spike"
      ? `loss spike ${numberText(mark.loss)}, expected ${numberText(mark.expected)}`
      : (mark.reason ?? "not finite");
  const samples = mark.samples.length
    ? `; samples ${mark.samples.slice(0, 6).join(", ")}${mark.num_samples > 6 ? ", …" : ""}`
    : "";
  return `step ${count(mark.step)}: ${what}${samples}; ${showCommand(mark, path)}`;
}

export function showCommand(mark, path) {
  return `trainyard data show ${shellWord(path)} --step ${mark.step}`;
}

/** A path as one word of a shell. */
export function shellWord(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

export function numberText(value) {
  return typeof value === "number" ? significant(value, 4) : (value ?? "–");
}
