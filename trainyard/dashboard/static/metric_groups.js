// Which charts show the metrics that only some runs have: one for each prefix, such as rewards of rewards/chosen.

const TITLES = { loss: "Loss terms", log_probs: "Log-probabilities", kl: "KL divergence" };
const FRACTION = /(^|[/_])(accuracy|fraction)$/; // of 0 to 1, so it has a chart of its own

/** Charts for the names of metrics: {title, names, isFirst, percent}. Those of rewards come first. */
export function metricGroups(names) {
  const groups = new Map();
  for (const name of names) {
    const key = FRACTION.test(name) ? name : prefixOf(name);
    groups.set(key, [...(groups.get(key) ?? []), name]);
  }
  return [...groups].map(([key, members]) => ({
    title: TITLES[key] ?? titleOf(members.length === 1 ? members[0] : key),
    names: members,
    isFirst: prefixOf(key) === "rewards",
    percent: FRACTION.test(key),
  }));
}

/** The name of a metric within its chart. */
export function shortName(name) {
  return name.slice(name.indexOf("/") + 1);
}

function prefixOf(name) {
  return name.split("/")[0];
}

function titleOf(name) {
  const text = name.replaceAll("_", " ").replace("/", ": ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
