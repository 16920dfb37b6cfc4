// The picture of pages that move: what prefill workers send, what decode workers receive.
//
// Each worker tells how much it moved, nobody tells between which two. So all lines meet in the
// middle, where the sum stands.

import { Keyed, setAttributes, setText, shape } from "./dom.js";
import { bytes, rate } from "./format.js";

const MOST_ROWS = 8; // of a pool; the workers beyond share one
const ROW = 46;
const NODE_HEIGHT = 38;
const HUB_HEIGHT = 44;
const WIDEST = 30; // what all lines of one side take together at the hub
const THINNEST = 1.5;
const NARROW = 420;

export class Flow {
  #svg;
  #sides;
  #hub;
  #peak = 0; // bytes per second that make the widest line; it falls slowly

  constructor(svg) {
    this.#svg = svg;
    const layers = { lines: shape("g"), nodes: shape("g") };
    this.#sides = ["prefill", "decode"].map((pool) => {
      const lines = shape("g", { class: `lines ${pool}` });
      const nodes = shape("g", { class: `nodes ${pool}` });
      layers.lines.append(lines);
      layers.nodes.append(nodes);
      return { pool, lines: new Keyed(lines), nodes: new Keyed(nodes) };
    });
    this.#hub = {
      box: shape("rect", { class: "hub", rx: 8 }),
      sum: shape("text", { class: "sum" }),
      pages: shape("text", { class: "pages" }),
    };
    svg.append(layers.lines, layers.nodes, ...Object.values(this.#hub));
  }

  /**
   * Draws the moment.
   *
   * `pools` has the workers of prefill and decode, each { id, rate } with bytes per second or null;
   * `perSecond` is the sum of what arrives, { bytes, pages }.
   */
  draw(pools, perSecond) {
    const width = this.#svg.clientWidth;
    if (!width) return; // not shown
    const rows = { prefill: rowsOf(pools.prefill), decode: rowsOf(pools.decode) };
    const height = ROW * Math.max(rows.prefill.length, rows.decode.length, 1);
    setAttributes(this.#svg, { viewBox: `0 0 ${width} ${height}`, height });
    const isNarrow = width < NARROW;
    const size = { width, height, node: isNarrow ? 90 : 124, hub: isNarrow ? 84 : 104 };
    const sums = Object.values(rows).map((each) => each.reduce((sum, row) => sum + row.rate, 0));
    this.#peak = Math.max(...sums, 0.95 * this.#peak, 1);
    for (const side of this.#sides) this.#drawSide(side, rows[side.pool], size);
    this.#drawHub(perSecond, size);
  }

  #drawSide({ pool, lines, nodes }, rows, { width, height, node, hub }) {
    const isLeft = pool === "prefill";
    const top = (height - ROW * rows.length) / 2;
    const thick = rows.map((row) => Math.max(THINNEST, (WIDEST * row.rate) / this.#peak));
    const gap = 1;
    let at = (height - thick.reduce((sum, each) => sum + each + gap, -gap)) / 2;
    const placed = rows.map((row, i) => {
      const here = { ...row, thick: thick[i], y: top + ROW * (i + 0.5), meets: at + thick[i] / 2 };
      at += thick[i] + gap;
      return here;
    });
    const from = isLeft ? node : (width + hub) / 2;
    const to = isLeft ? (width - hub) / 2 : width - node;
    lines.show(placed, {
      key: (row) => row.id,
      make: () => {
        const parts = [shape("path", { class: "line" }), shape("path", { class: "moving" })];
        const group = shape("g");
        group.append(...parts);
        return { node: group, parts };
      },
      update: ({ node: group, parts }, row) => {
        const d = curve(from, isLeft ? row.y : row.meets, to, isLeft ? row.meets : row.y);
        for (const part of parts) part.setAttribute("d", d);
        parts[0].setAttribute("stroke-width", row.thick.toFixed(1));
        group.setAttribute("class", row.rate > 0 ? "busy" : "");
      },
    });
    nodes.show(placed, {
      key: (row) => row.id,
      make: () => {
        const made = {
          node: shape("g"),
          title: shape("title"),
          box: shape("rect", { rx: 6 }),
          name: shape("text", { class: "name" }),
          rate: shape("text", { class: "rate" }),
        };
        made.node.append(made.title, made.box, made.name, made.rate);
        return made;
      },
      update: (made, row) => {
        const x = isLeft ? 0 : width - node;
        const y = row.y - NODE_HEIGHT / 2;
        setAttributes(made.box, { x: x + 0.5, y, width: node - 1, height: NODE_HEIGHT });
        setAttributes(made.name, { x: x + 9, y: y + 16 });
        setAttributes(made.rate, { x: x + 9, y: y + 30 });
        setText(made.name, cut(row.id, node < 100 ? 10 : 15));
        setText(made.rate, row.rate > 0 ? `${bytes(row.rate)}/s` : "idle");
        setText(made.title, row.id);
      },
    });
  }

  #drawHub(perSecond, { width, height, hub }) {
    const { box, sum, pages } = this.#hub;
    const middle = { x: width / 2, y: height / 2 };
    const corner = { x: middle.x - hub / 2, y: middle.y - HUB_HEIGHT / 2 };
    setAttributes(box, { ...corner, width: hub, height: HUB_HEIGHT });
    setAttributes(sum, { x: middle.x, y: middle.y - 2 });
    setAttributes(pages, { x: middle.x, y: middle.y + 14 });
    setText(sum, `${bytes(perSecond.bytes)}/s`);
    setText(pages, `${rate(perSecond.pages)} pages/s`);
  }
}

function rowsOf(workers) {
  const rows = workers.map(({ id, rate }) => ({ id, rate: rate ?? 0 }));
  if (rows.length <= MOST_ROWS) return rows;
  const rest = rows.splice(MOST_ROWS - 1);
  const sum = rest.reduce((all, row) => all + row.rate, 0);
  return [...rows, { id: `${rest.length} more`, rate: sum }];
}

function curve(x1, y1, x2, y2) {
  const middle = (x1 + x2) / 2;
  const [from, to] = [y1.toFixed(1), y2.toFixed(1)];
  return `M${x1} ${from}C${middle} ${from} ${middle} ${to} ${x2} ${to}`;
}

function cut(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
