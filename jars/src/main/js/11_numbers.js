// Numbers as text.

const known = (value) => typeof value === "number" && Number.isFinite(value);
const DASH = "\u2013";

function formatCount(value) {
  return known(value) ? Math.round(value).toLocaleString("en-US") : DASH;
}

function formatValue(value) {
  if (!known(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e7) return value.toExponential(3);
  if (size >= 1000) return value.toLocaleString("en-US", { maximumFractionDigits: 1 });
  return String(Number(value.toPrecision(4)));
}

/** An axis label: as short as it can be told apart from its neighbours, which are `gap` away. */
function formatTick(value, gap) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e15)) return value.toExponential(0);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit * 10 || (size >= unit && gap >= unit / 10)) {
      return `${Number((value / unit).toFixed(decimals(gap / unit)))}${letter}`;
    }
  }
  return String(Number(value.toFixed(decimals(gap))));
}

const decimals = (gap) => Math.min(12, Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9)));

/** As in Spark's own tables: 35 ms, 12 s, 2.1 min, 1.3 h. */
function formatDuration(seconds) {
  if (!known(seconds)) return DASH;
  if (seconds < 0.01) return `${Number((seconds * 1000).toFixed(1))} ms`;
  if (seconds < 0.1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function formatBytes(bytes) {
  if (!known(bytes)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? bytes : bytes.toFixed(1)} ${units[unit]}`;
}

function formatTime(seconds) {
  if (!known(seconds)) return DASH;
  const at = new Date(seconds * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${at.getFullYear()}/${two(at.getMonth() + 1)}/${two(at.getDate())} ` +
    `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

const plural = (count, one) => `${formatCount(count)} ${one}${count === 1 ? "" : "s"}`;
