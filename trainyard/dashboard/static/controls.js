// What holds for all charts: x axis, smoothing, logarithmic axes, and the way back from a zoom.

import { element } from "./dom.js";

const AXIS_CHOICES = { step: "Step", tokens: "Tokens", time: "Time" };

export class Controls {
  constructor(state, onReset) {
    this.state = state;
    this.axes = Object.entries(AXIS_CHOICES).map(([value, title]) => {
      const input = element("input", { type: "radio", name: "axis", value });
      input.addEventListener("change", () => state.set({ axis: value }));
      element("label", {}, input, element("span", {}, title));
      return input;
    });
    this.slider = element("input", { type: "range", min: 0, max: 100, step: 1, value: state.smoothing });
    this.slider.addEventListener("input", () => state.set({ smoothing: Number(this.slider.value) }));
    this.reset = element("button", { type: "button", hidden: true, on: { click: onReset } }, "Show everything");
    const labels = this.axes.map((input) => input.parentElement);
    this.bar = element(
      "div",
      { className: "controls" },
      element("fieldset", { className: "segments" }, element("legend", {}, "x axis"), labels),
      element("label", { className: "slider" }, "Smoothing", this.slider),
      element("span", { className: "checks" }, this.#box("logY", "Log y"), this.#box("logX", "Log x")),
      this.reset,
    );
  }

  #box(key, title) {
    const input = element("input", { type: "checkbox", checked: this.state[key] });
    input.addEventListener("change", () => this.state.set({ [key]: input.checked }));
    return element("label", { className: "check" }, input, title);
  }

  /** Show the state; an axis that none of the shown runs has cannot be chosen. */
  draw(shown) {
    this.bar.hidden = !shown.length;
    this.reset.hidden = !this.state.range;
    for (const input of this.axes) {
      input.checked = input.value === this.state.axis;
      input.disabled = input.value !== "step" && !shown.some(([, data]) => data.hasAxis(input.value));
      input.parentElement.title = input.disabled ? "These runs have not logged it" : "";
    }
  }
}
