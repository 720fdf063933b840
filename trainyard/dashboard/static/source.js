// Where the data comes from: the server, or the report that this page is part of.

/** Asks the server. Every method throws an Error with a text for people. */
export class LiveSource {
  isLive = true;

  async get(path, query = {}) {
    const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null);
    const search = given.length ? `?${new URLSearchParams(given)}` : "";
    const answer = await fetch(path + search, { headers: { Accept: "application/json" } });
    if (answer.status === 401) location.reload(); // the server asks for the token
    const data = await answer.json();
    if (!answer.ok) throw new Error(data.error ?? `status ${answer.status}`);
    return data;
  }

  runs(since) {
    return this.get("/api/runs", { since });
  }

  curves(name, query) {
    return this.get(`/api/runs/${encodeURIComponent(name)}/curves`, query);
  }

  /** A part of a run: events, config, checkpoints, inputs, rollouts, samples, step-times, plan, logs. */
  part(name, part) {
    return this.get(`/api/runs/${encodeURIComponent(name)}/${part}`);
  }

  log(name, file, offset) {
    const path = file.split("/").map(encodeURIComponent).join("/");
    return this.get(`/api/runs/${encodeURIComponent(name)}/logs/${path}`, { offset });
  }
}

/** Reads what `trainyard report` put into the page. */
export class ReportSource {
  isLive = false;

  constructor(data) {
    this.data = data;
  }

  async runs() {
    return this.data.list;
  }

  async curves(name) {
    return this.data.parts[name].curves;
  }

  async part(name, part) {
    return this.data.parts[name][part];
  }

  async log(name, file) {
    return this.data.parts[name]["log-texts"][file];
  }
}

export function createSource() {
  const embedded = document.getElementById("report-data");
  return embedded ? new ReportSource(JSON.parse(embedded.textContent)) : new LiveSource();
}
