// The configuration of a run, alone or next to that of another one.

import { element, emptyState, table } from "./dom.js";

/** A table of keys; with `other`, of those whose values differ unless `all` is true. */
export function configTable(name, config, otherName, other, all) {
  if (config.problem) return emptyState(config.problem);
  if (!other) {
    return table(
      `Configuration of ${name}`,
      [{ title: "key" }, { title: name }],
      Object.entries(config.keys).map(([key, value]) => [code(key), code(value)]),
    );
  }
  if (other.problem) return emptyState(`${otherName}: ${other.problem}`);
  const keys = [...new Set([...Object.keys(config.keys), ...Object.keys(other.keys)])];
  const differing = keys.filter((key) => config.keys[key] !== other.keys[key]);
  const shown = all ? keys : differing;
  if (!shown.length) return emptyState("Both runs have the same configuration.");
  const cell = (keys_, key, isOther) => {
    const isChanged = config.keys[key] !== other.keys[key];
    return element(
      "code",
      { className: isChanged ? (isOther ? "changed other" : "changed") : "" },
      keys_[key] ?? "(not set)",
    );
  };
  return table(
    `Differences of ${name} and ${otherName}`,
    [{ title: `key (${differing.length} differ)` }, { title: name }, { title: otherName }],
    shown.map((key) => [code(key), cell(config.keys, key, false), cell(other.keys, key, true)]),
  );
}

function code(text) {
  return element("code", {}, text);
}
