// Numbers as people read them, always with their unit.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** A count: 1,234 or 1.23M. */
export function count(number) {
  return number < 100_000 ? whole.format(number) : short.format(number);
}

/** A count with the word for what is counted. */
export function counted(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** A size: 1536 is 1.5 KiB. */
export function bytes(number) {
  let size = number;
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (size < 1023.5 || unit === "TiB") {
      return `${size.toFixed(unit === "B" || size >= 99.95 ? 0 : 1)} ${unit}`;
    }
    size /= 1024;
  }
}

/** A rate of anything but bytes; small ones keep a digit. */
export function rate(perSecond) {
  const isSmall = perSecond > 0 && perSecond < 9.95;
  return isSmall ? perSecond.toFixed(1) : count(Math.round(perSecond));
}

/** A share of 0 to 1. */
export function percent(share) {
  return `${Math.round(100 * share)}%`;
}

/** A time. */
export function seconds(ms) {
  return ms < 999.5 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 9950 ? 1 : 0)} s`;
}
