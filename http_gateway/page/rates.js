// Rates out of sums. Pure: it knows no clock, and takes times from what the gateway says.

const KEPT_S = 65;
export const LIVING = new Set(["ready", "draining"]); // states in which the last numbers hold

/**
 * Keeps what each start of each worker told within the last minute.
 *
 * A worker's sums begin anew when it does, so each start is another series. A sum belongs to the
 * moment of its heartbeat, not to that of the answer.
 */
export class Sums {
  #series = new Map(); // worker and start |-> [{ at, worker }], oldest first

  add(snapshot) {
    const seen = new Set();
    for (const worker of snapshot.workers) {
      const name = nameOf(worker);
      seen.add(name);
      if (!LIVING.has(worker.state)) {
        this.#series.delete(name);
        continue;
      }
      const series = this.#series.get(name) ?? [];
      const at = snapshot.time_s - worker.heartbeat_age_ms / 1000;
      const last = series.at(-1);
      if (!last || at > last.at + 0.05) series.push({ at, worker });
      while (series[0].at < at - KEPT_S) series.shift();
      this.#series.set(name, series);
    }
    for (const name of this.#series.keys()) if (!seen.has(name)) this.#series.delete(name);
  }

  /** How much a sum grew per second within the last `overS` seconds; null: not known yet. */
  rate(worker, field, overS = 3) {
    const ends = this.#ends(worker, overS);
    if (!ends) return null;
    const [first, last] = ends;
    return Math.max(0, last.worker[field] - first.worker[field]) / (last.at - first.at);
  }

  /** How much a sum grew within the last `overS` seconds. */
  growth(worker, field, overS) {
    const ends = this.#ends(worker, overS);
    return ends ? Math.max(0, ends[1].worker[field] - ends[0].worker[field]) : 0;
  }

  #ends(worker, overS) {
    const series = this.#series.get(nameOf(worker));
    if (!series || series.length < 2) return null;
    const last = series.at(-1);
    // One sample further back than the window, so that the window is filled.
    let first = series.length - 2;
    while (first > 0 && series[first].at > last.at - overS) first -= 1;
    return [series[first], last];
  }
}

/** The sum of numbers of which some may not be known; null if none is. */
export function total(numbers) {
  const known = numbers.filter((each) => each !== null);
  return known.length ? known.reduce((sum, each) => sum + each, 0) : null;
}

function nameOf(worker) {
  return `${worker.worker_id}/${worker.incarnation}`;
}
