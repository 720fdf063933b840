// Creates elements of the page. Text is always set as text, never as HTML.

/** An element with properties and children; properties with a dash are attributes, `on` holds event handlers. */
export function element(tag, properties = {}, ...children) {
  const created = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) created.addEventListener(event, handler);
    } else if (name.includes("-") || name === "role" || name === "for") {
      created.setAttribute(name, value);
    } else {
      created[name] = value;
    }
  }
  created.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return created;
}

/** A table whose cells are texts or elements. Columns are {title, number}. */
export function table(caption, columns, rows) {
  const cell = (tag, content, column, scope) =>
    element(tag, { className: column.number ? "number" : "", scope }, content);
  return element(
    "div",
    { className: "scroll", tabIndex: 0, role: "region", "aria-label": caption },
    element(
      "table",
      {},
      element("caption", { className: "hidden" }, caption),
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          columns.map((column) => cell("th", column.title, column, "col")),
        ),
      ),
      element(
        "tbody",
        {},
        rows.map((row) =>
          element(
            "tr",
            {},
            row.map((content, index) => cell("td", content, columns[index])),
          ),
        ),
      ),
    ),
  );
}

/** A paragraph for a place that has nothing to show, with an optional command that would change that. */
export function emptyState(text, command) {
  return element("div", { className: "empty" }, element("p", {}, text), command ? commandLine(command) : null);
}

/** A command that can be copied. */
export function commandLine(command) {
  const button = element("button", { type: "button", className: "copy", "aria-label": `Copy: ${command}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it";
    }
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return element("span", { className: "command" }, element("code", {}, command), button);
}

/** Say something to users of a screen reader. */
export function announce(text) {
  document.getElementById("announcement").textContent = text;
}
