// The panels with texts of a run: training texts, rollouts and text samples.

import { element, emptyState } from "./dom.js";
import { count, percent, significant } from "./format.js";
import { shellWord } from "./marks.js";

const PAIR_TITLES = { chosen: "Chosen", rejected: "Rejected" };

export async function samplesPanel({ name, source }) {
  const found = await source.part(name, "samples");
  if (!found.length)
    return emptyState("No text samples. A run writes them with:", "trainyard train my.yaml samples.every=100");
  return textList(found, (each) => [
    line(`step ${count(each.step)}`),
    element("blockquote", {}, element("b", {}, each.prompt), each.text),
  ]);
}

/** Samples of the first step, with what of them is trained. */
export async function inputsPanel({ name, source, state }) {
  const found = await source.part(name, "inputs");
  if (!found.length)
    return emptyState(
      "No samples: runs on conversations and preferences (data.source=chat or preference) write their first ones, which reports leave out. To print some:",
      `trainyard data show ${shellWord(state.pathOf(name))} --step 1`,
    );
  return textList(found, (each) => (each.chosen ? pair(each) : sample(each)));
}

function sample(each) {
  return [line(`sample ${each.sample}: ${each.source}`), markedText(each), line(trainedText(each))];
}

/** The prompt, and both answers beside each other. */
function pair(each) {
  const number = each.pairs > 1 ? `, pair ${each.pair} of ${each.pairs}` : "";
  const answers = Object.entries(PAIR_TITLES).map(([key, title]) =>
    element("div", {}, element("h4", {}, title), markedText(each[key]), line(trainedText(each[key]))),
  );
  return [
    line(`sample ${each.sample}${number}: ${each.source}`),
    markedText(each.prompt),
    element("div", { className: "answers" }, answers),
  ];
}

function markedText({ parts }) {
  return element(
    "blockquote",
    {},
    parts.map(([text, isTrained]) => (isTrained ? element("mark", {}, text) : text)),
  );
}

function trainedText({ tokens, trained, shown }) {
  const text = `${count(tokens)} ${tokens === 1 ? "token" : "tokens"}, ${count(trained)} trained (${percent(trained / Math.max(tokens, 1))})`;
  return shown < tokens ? `${text}; the first ${count(shown)} are shown` : text;
}

/** Groups of completions of one prompt, by reward. */
export async function rolloutsPanel({ name, source }) {
  const found = await source.part(name, "rollouts");
  if (!found.length)
    return emptyState(
      "No rollouts: runs that learn from rewards (train.objective=grpo) write some of them, which reports leave out. To start one:",
      "trainyard train my.yaml train.objective=grpo",
    );
  return textList(found, ({ step, group, prompt, texts }) => [
    line(`step ${count(step)}, group ${group}: ${count(texts.length)} ${texts.length === 1 ? "completion" : "completions"}`),
    element("blockquote", {}, element("b", {}, prompt)),
    element(
      "ol",
      { className: "completions" },
      texts.map((each) => element("li", {}, line(rewardText(each)), element("blockquote", {}, each.text))),
    ),
  ]);
}

function rewardText({ reward, advantage, rewards, tokens, is_cut }) {
  const named = Object.entries(rewards);
  return [
    `reward ${significant(reward, 3)}`,
    ...(named.length > 1 ? named.map(([name, value]) => `${name} ${significant(value, 3)}`) : []),
    `advantage ${significant(advantage, 3)}`,
    tokens === null ? "" : `${count(tokens)} ${tokens === 1 ? "token" : "tokens"}${is_cut ? ", cut off" : ""}`,
  ]
    .filter(Boolean)
    .join(" · ");
}

function line(text) {
  return element("p", { className: "line" }, text);
}

function textList(found, content) {
  return element(
    "ol",
    { className: "texts" },
    found.map((each) => element("li", {}, ...content(each))),
  );
}
