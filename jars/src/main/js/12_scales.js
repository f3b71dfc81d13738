// Ticks, smoothing, and the point that is nearest.

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  return evenTicks(low, high, power * [1, 2, 5, 10].find((some) => some * power >= rough * 0.7));
}

/** Round numbers of seconds, minutes or hours. */
function timeTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (rough < 1) return linearTicks(low, high, count);
  const gaps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200,
    86400];
  return evenTicks(low, high, gaps.find((some) => some >= rough * 0.7) ??
    86400 * Math.ceil(rough / 86400));
}

function evenTicks(low, high, gap) {
  const ticks = [];
  for (let index = Math.ceil(low / gap - 1e-9); index * gap <= high + gap * 1e-9; index += 1) {
    ticks.push(index * gap);
  }
  return { ticks, gap };
}

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / count));
  const ticks = [];
  for (let power = first; power <= last; power += every) {
    for (const factor of last - first <= 2 ? [1, 2, 5] : [1]) {
      const value = factor * 10 ** power;
      if (value >= low && value <= high) ticks.push(value);
    }
  }
  // Less than a decade may hold one round number or none: then the linear ones say more.
  return ticks.length >= 2 ? { ticks, gap: null } : linearTicks(low, high, count);
}

/** A running mean that forgets; `weight` is what is kept of it over the mean distance of points. */
function smoothed(points, weight) {
  if (weight <= 0 || points.length < 3) return points;
  const spacing = (points[points.length - 1][0] - points[0][0]) / (points.length - 1) || 1;
  let sum = 0, mass = 0, before = points[0][0];
  return points.map(([x, y]) => {
    if (!known(y)) return [x, y];
    // Thinned points aren't evenly spaced: a wide gap forgets more.
    const kept = weight ** (Math.max(0, x - before) / spacing);
    sum = sum * kept + y;
    mass = mass * kept + 1;
    before = x;
    return [x, sum / mass];
  });
}

/** The index of the point nearest to `x`; points are in order of x. */
function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1;
    else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? low - 1 : low;
}
