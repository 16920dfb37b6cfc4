// The live view: asks GET /cluster once a second while somebody can see it, and shows the answer.

import { ApiError, call } from "./api.js";
import { byId, element, Keyed, setAttributes, setText, shape } from "./dom.js";
import { Flow } from "./flow.js";
import { bytes, count, counted, percent, rate, seconds } from "./format.js";
import { LIVING, Sums, total } from "./rates.js";

const PERIOD_MS = 1000;
const TIMEOUT_MS = 5000;
const HISTORY = 60; // points of a line
const MINUTE_S = 60;
const USES = {
  live: "in use by a sequence",
  cached: "kept for prompts with the same prefix",
  leased: "held until the receiver has copied them",
  incoming: "being received",
  quarantine: "a failed transfer may still write them",
  free: "empty",
};

export class Cluster {
  #sums = new Sums();
  #snapshot = null;
  #flow = new Flow(byId("flow"));
  #workers = new Keyed(byId("workers"));
  #uses = new Keyed(byId("uses"));
  #prefixes = new Keyed(byId("prefix-rows"));
  #lines = { generated: new Line("generated-line"), computed: new Line("computed-line") };
  #hasModel = false;
  #isDeclined = false; // the user gave no key
  #isForbidden = false; // the key is of no operator
  #isAsking = false;
  #timer = 0;

  /** Polls from now on. */
  start() {
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.again();
      else this.#pause();
    });
    new ResizeObserver(() => this.draw()).observe(byId("cluster"));
    this.again();
  }

  /** Asks at once, and then each second. */
  async again() {
    clearTimeout(this.#timer);
    if (this.#isAsking) return;
    this.#isAsking = true;
    try {
      await this.#ask();
    } finally {
      this.#isAsking = false;
    }
    if (document.hidden) this.#pause();
    else if (!this.#isForbidden) this.#timer = setTimeout(() => this.again(), PERIOD_MS);
  }

  /** Shows what is known. */
  draw() {
    if (!this.#snapshot) return;
    const workers = this.#snapshot.workers.toSorted(byPoolAndName);
    const living = workers.filter((each) => LIVING.has(each.state));
    const pools = { prefill: ofPool(living, "prefill"), decode: ofPool(living, "decode") };
    this.#drawTiles(living, pools);
    this.#drawFlow(pools);
    const inUse = (use) => sumOf(living, (each) => each.pages[use]);
    this.#uses.show(Object.entries(USES), {
      key: ([use]) => use,
      make: ([use, meaning]) => {
        const number = element("b");
        const node = element("li", "", element("span", `swatch ${use}`), `${use} `, number);
        node.title = meaning;
        return { node, number };
      },
      update: ({ number }, [use]) => setText(number, count(inUse(use))),
    });
    this.#workers.show(workers, {
      key: (worker) => `${worker.worker_id}/${worker.incarnation}`,
      make: makeRow,
      update: (row, worker) => this.#drawRow(row, worker),
    });
    byId("no-workers").hidden = workers.length > 0;
    this.#drawPrefixes(this.#snapshot.hot_prefixes);
  }

  #pause() {
    clearTimeout(this.#timer);
    showState("paused");
  }

  async #ask() {
    try {
      const response = await call("cluster", { timeoutMs: TIMEOUT_MS, isQuiet: this.#isDeclined });
      const snapshot = await response.json();
      this.#isDeclined = this.#isForbidden = false;
      this.#take(snapshot);
      if (!this.#hasModel) await this.#showModel();
    } catch (error) {
      if (error.status === 401) this.#isDeclined = true;
      this.#isForbidden = error.status === 403;
      this.#hasModel = false; // another one may come up
      byId("trouble").hidden = false;
      setText(byId("trouble"), told(error));
      byId("figures").classList.add("stale");
      showState(this.#isForbidden ? "for operators" : "no answer");
    }
    if (this.#isForbidden) await this.#showModel().catch(() => {}); // of which every tenant may know
  }

  #take(snapshot) {
    this.#snapshot = snapshot;
    this.#sums.add(snapshot);
    const living = snapshot.workers.filter((each) => LIVING.has(each.state));
    this.#lines.generated.add(this.#rateOf(living, "generated_tokens"));
    this.#lines.computed.add(this.#rateOf(living, "computed_tokens"));
    byId("trouble").hidden = true;
    byId("figures").hidden = false;
    byId("figures").classList.remove("stale");
    showState("live");
    this.draw();
  }

  async #showModel() {
    const response = await call("v1/models", { timeoutMs: TIMEOUT_MS, isQuiet: true });
    const [model] = (await response.json()).data;
    setText(byId("model"), `${model.id}, ${counted(model.max_model_len, "token")} of context`);
    for (const [name, value] of Object.entries(model.sampling_defaults ?? {})) {
      byId("settings").querySelector(`[name=${name}]`).placeholder = value;
    }
    this.#hasModel = true;
  }

  #drawTiles(living, pools) {
    for (const id of ["generated", "computed"]) {
      const field = `${id}_tokens`;
      const known = this.#rateOf(living, field);
      showFigure(id, known === null ? "…" : rate(known), "tokens/s");
      setText(byId(`${id}-more`), `${count(sumOf(living, (each) => each[field]))} in total`);
    }
    const found = this.#hits(pools.decode);
    showFigure("found", found ? percent(found.share) : "–", found ? "of tokens" : "");
    const prefill = this.#hits(pools.prefill);
    setText(
      byId("found-more"),
      found
        ? `decode, ${found.when}` + (prefill ? `; prefill ${percent(prefill.share)}` : "")
        : "no prompts yet",
    );
    byId("found-part").style.width = percent(found?.share ?? 0);
    const snapshot = this.#snapshot;
    const active = snapshot.active_requests;
    showFigure("running", count(active), active === 1 ? "request" : "requests");
    const running = sumOf(pools.decode, (each) => each.running);
    const waiting = sumOf(pools.decode, (each) => each.waiting);
    const isIdle = !active && !running && !waiting; // then one zero says it
    setText(byId("running-more"), isIdle ? "" : `${count(running)} running, ${count(waiting)} waiting`);
    const told = [`${count(snapshot.finished_requests)} answered`];
    if (snapshot.resumed_requests) told.push(`${count(snapshot.resumed_requests)} resumed`);
    told.push(`${counted(snapshot.index_pages, "page")} in the index`);
    setText(byId("requests"), told.join(" · "));
  }

  #drawFlow(pools) {
    const rows = (workers) =>
      workers.map((each) => ({ id: each.worker_id, rate: this.#sums.rate(each, "bytes_moved") }));
    // Both sides count what moves; what has arrived is what counts.
    const perSecond = {
      bytes: this.#rateOf(pools.decode, "bytes_moved") ?? 0,
      pages: this.#rateOf(pools.decode, "pages_moved") ?? 0,
    };
    const svg = byId("flow");
    const hasBoth = pools.prefill.length > 0 && pools.decode.length > 0;
    svg.classList.toggle("hidden", !hasBoth);
    const moved = bytes(sumOf(pools.decode, (each) => each.bytes_moved));
    let note = `${moved} in total.`;
    if (!hasBoth) {
      const missing = pools.decode.length ? "prefill" : "decode";
      note = `No ${missing} worker is alive, so nothing moves: pagewire scale --${missing} 1 adds one.`;
    } else if (!perSecond.bytes) {
      note += " Nothing is moving: pages flow when a prompt is new to the decode workers.";
    }
    setText(byId("flow-note"), note);
    const from = counted(pools.prefill.length, "prefill worker");
    const to = counted(pools.decode.length, "decode worker");
    svg.setAttribute("aria-label", `From ${from} to ${to}: ${bytes(perSecond.bytes)} per second`);
    this.#flow.draw({ prefill: rows(pools.prefill), decode: rows(pools.decode) }, perSecond);
  }

  #drawRow(row, worker) {
    const isLiving = LIVING.has(worker.state);
    row.node.className = `worker ${worker.pool} ${worker.state}`;
    setText(row.pool, worker.pool);
    setText(row.state, worker.state);
    row.bar.hidden = !isLiving;
    if (!isLiving) {
      const silence = worker.misfit ? `Gets no requests: ${worker.misfit}.`
        : `Gets no requests. Last heartbeat ${seconds(worker.heartbeat_age_ms)} ago.`;
      setText(row.numbers, worker.state === "dead" ? silence : "Waiting for its first heartbeat.");
      setText(row.load, "");
      setText(row.faults, "");
      return;
    }
    setText(row.load, `${count(worker.running)} running, ${count(worker.waiting)} waiting`);
    const { pages } = worker;
    for (const [use, part] of Object.entries(row.parts)) part.style.flexGrow = String(pages[use]);
    const uses = Object.keys(USES).filter((use) => pages[use]);
    const told = uses.map((use) => `${count(pages[use])} ${use}`).join(", ");
    row.bar.setAttribute("aria-label", `${counted(pages.total, "page")}: ${told}`);
    const isPrefill = worker.pool === "prefill";
    const tokens = this.#sums.rate(worker, isPrefill ? "computed_tokens" : "generated_tokens") ?? 0;
    const moved = this.#sums.rate(worker, "bytes_moved") ?? 0;
    const hits = this.#hits([worker]);
    const needed = this.#sums.growth(worker, "attention_needed_bytes", MINUTE_S);
    const read = this.#sums.growth(worker, "attention_read_bytes", MINUTE_S);
    const numbers = [
      `${count(pages.total - pages.free)} of ${counted(pages.total, "page")}`,
      hits ? `${percent(hits.share)} hits` : "",
      `${rate(tokens)} ${isPrefill ? "prompt tokens" : "tokens"}/s`,
      `${bytes(moved)}/s ${isPrefill ? "sent" : "received"}`,
      needed ? `KV reads ${percent(read / needed)} of unshared` : "",
      worker.queued_tokens ? `${counted(worker.queued_tokens, "token")} queued` : "",
    ];
    setText(row.numbers, numbers.filter(Boolean).join(" · "));
    const faults = [
      worker.transfer_failures ? counted(worker.transfer_failures, "failed transfer") : "",
      worker.preemptions ? counted(worker.preemptions, "preemption") : "",
    ];
    setText(row.faults, faults.filter(Boolean).join(" · "));
  }

  #drawPrefixes(prefixes) {
    const most = prefixes[0]?.num_hits;
    this.#prefixes.show(prefixes, {
      key: (prefix) => prefix.prefix_id,
      make: makePrefixRow,
      update: (row, prefix) => {
        setText(row.length, counted(prefix.num_tokens, "token"));
        setText(row.hits, count(prefix.num_hits));
        row.part.style.width = percent(prefix.num_hits / most);
        setText(row.workers, prefix.workers.join(", ") || "no worker");
      },
    });
    byId("prefixes").hidden = !prefixes.length;
    byId("no-prefixes").hidden = prefixes.length > 0;
  }

  #rateOf(workers, field) {
    return total(workers.map((each) => this.#sums.rate(each, field)));
  }

  /** The share of prompt tokens that were found, within the last minute if there were any. */
  #hits(workers) {
    const recent = (field) => sumOf(workers, (each) => this.#sums.growth(each, field, MINUTE_S));
    const lookedUp = recent("looked_up_tokens");
    if (lookedUp) return { share: recent("cached_tokens") / lookedUp, when: "last minute" };
    const ever = sumOf(workers, (each) => each.looked_up_tokens);
    if (!ever) return null;
    return { share: sumOf(workers, (each) => each.cached_tokens) / ever, when: "since the start" };
  }
}

/** A line of the last minute, as tall as its highest point. */
class Line {
  #values = [];
  #path = shape("polyline");

  constructor(id) {
    const svg = byId(id);
    setAttributes(svg, { viewBox: `0 0 ${HISTORY - 1} 20`, preserveAspectRatio: "none" });
    svg.append(this.#path);
  }

  add(value) {
    if (value === null) return; // not known yet
    this.#values.push(value);
    if (this.#values.length > HISTORY) this.#values.shift();
    const most = Math.max(...this.#values, 1);
    const first = HISTORY - this.#values.length;
    const height = (each) => (19 - (18 * each) / most).toFixed(1);
    const points = this.#values.map((each, i) => `${first + i},${height(each)}`);
    this.#path.setAttribute("points", points.join(" "));
  }
}

function makeRow(worker) {
  const parts = Object.fromEntries(Object.keys(USES).map((use) => [use, element("span", use)]));
  const row = {
    pool: element("span", "pool"),
    state: element("span", "state"),
    load: element("span", "load soft"),
    bar: element("div", "uses", ...Object.values(parts)),
    parts,
    numbers: element("p", "numbers soft"),
    faults: element("p", "wrong"),
  };
  row.bar.setAttribute("role", "img");
  const name = element("b", "name", worker.worker_id);
  const head = element("p", "head", name, row.pool, row.state, row.load);
  row.node = element("li", "worker", head, row.bar, row.numbers, row.faults);
  return row;
}

function makePrefixRow(prefix) {
  const row = {
    length: element("td", "number"),
    hits: element("span"),
    part: element("span", "part"),
    workers: element("td", "soft"),
  };
  const bar = element("span", "share", row.part);
  bar.setAttribute("aria-hidden", "true");
  const name = element("th", "name", prefix.prefix_id);
  name.scope = "row";
  const hits = element("td", "number", row.hits, bar);
  row.node = element("tr", "", name, row.length, hits, row.workers);
  return row;
}

function showFigure(id, number, unit) {
  const at = byId(id);
  if (!at.firstChild) at.append(element("b"), " ", element("span", "unit"));
  setText(at.firstChild, number);
  setText(at.lastChild, unit);
}

function showState(state) {
  setText(byId("live"), state);
  byId("live").dataset.state = state;
}

function told(error) {
  if (error.status === 401) return "The gateway requires an API key to show the cluster.";
  if (error.status === 403) return "Only operators see the cluster. Your key can chat.";
  const what = error instanceof ApiError ? error.message : `No answer: ${error.message}`;
  return `${what} The page asks again each second; pagewire status asks the router itself.`;
}

function ofPool(workers, pool) {
  return workers.filter((each) => each.pool === pool);
}

function sumOf(items, number) {
  return items.reduce((sum, each) => sum + number(each), 0);
}

function byPoolAndName(a, b) {
  const order = ["prefill", "decode"];
  const byPool = order.indexOf(a.pool) - order.indexOf(b.pool);
  return byPool || a.worker_id.localeCompare(b.worker_id, "en", { numeric: true });
}
