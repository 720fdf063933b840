// Light and dark: as the system says, or as the user chooses with the button.

const LABELS = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
const NEXT = { auto: "light", light: "dark", dark: "auto" };

/** Connect the button; `onChange` is called when the colors have changed. */
export function startTheme(button, onChange) {
  let chosen = read();
  const apply = () => {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    button.textContent = LABELS[chosen];
  };
  button.addEventListener("click", () => {
    chosen = NEXT[chosen];
    try {
      localStorage.setItem("theme", chosen);
    } catch {
      // the choice lasts until the page is closed
    }
    apply();
    onChange();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
  apply();
}

function read() {
  try {
    const stored = localStorage.getItem("theme");
    return stored in LABELS ? stored : "auto";
  } catch {
    return "auto";
  }
}

const resolved = new Map();

/** The color of a CSS variable as the canvas needs it. */
export function colorOf(variable) {
  const scheme =
    getComputedStyle(document.documentElement).colorScheme + matchMedia("(prefers-color-scheme: dark)").matches;
  const key = `${variable} ${scheme}`;
  if (!resolved.has(key)) resolved.set(key, resolve(variable));
  return resolved.get(key);
}

function resolve(variable) {
  const probe = document.createElement("span");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const color = getComputedStyle(probe).color;
  probe.remove();
  return color;
}
