"use strict";
/*
 * Charts.points(element, { title, description, x, y, high?, points })
 * points: [{ name, style, seeds: [{ x, y, name, lost? }] }]: every seed is small, the mean is large.
 * x is logarithmic; what costs nothing stands left of the axis, at 0.
 */
(() => {
  const HEIGHT = 320;

  Charts.points = (element, data) => {
    Charts.frame(element, data, (width) => draw(data, width), () => tabulate(data));
  };

  const mean = (list) => list.reduce((sum, each) => sum + each, 0) / list.length;

  function draw(data, width) {
    const area = { left: 46, right: width - 16, top: 28, bottom: HEIGHT - 44 };
    const seeds = data.points.flatMap((point) => point.seeds).filter((seed) => seed.y !== null);
    const spent = seeds.map((seed) => seed.x).filter((each) => each > 0);
    const free = seeds.some((seed) => !(seed.x > 0));
    const ends = spent.length ? [Math.log10(Math.min(...spent)) - 0.06, Math.log10(Math.max(...spent)) + 0.06] : [0, 1];
    const start = area.left + (free ? 44 : 6);
    const along = Charts.scale(ends, [start, area.right]);
    const x = (value) => (value > 0 ? along(Math.log10(value)) : area.left + 16);
    const [low, high] = Charts.range(seeds.map((seed) => seed.y), { low: 0, high: data.high ?? Infinity });
    const y = Charts.scale([low, high], [area.bottom, area.top]);
    const svg = Charts.canvas(width, HEIGHT);
    Charts.axes(svg, area, {
      x: data.x, y: data.y,
      xTicks: [...(free ? [[x(0), "0"]] : []), ...decades(ends, start, area.right).map((each) => [x(each), Charts.show(each, 4)])],
      yTicks: Charts.ticks(low, high, 6).map((each) => [y(each), Charts.show(each, 2)]),
    });
    if (free) svg.append(Charts.svg("line", { class: "reference", x1: start - 14, x2: start - 14, y1: area.top, y2: area.bottom }));
    const spots = [];
    for (const [row, point] of data.points.entries()) {
      const known = point.seeds.filter((seed) => seed.y !== null);
      const group = Charts.svg("g", { class: `mark-dot ${Charts.color(point.style.color)}` });
      svg.append(group);
      for (const seed of known) {
        if (seed.lost) svg.append(Charts.cross(x(seed.x), y(seed.y)));
        else group.append(Charts.svg("circle", { cx: x(seed.x), cy: y(seed.y), r: 2.4 }));
      }
      if (!known.length) continue;
      const middle = [mean(known.map((seed) => seed.x)), mean(known.map((seed) => seed.y))];
      group.append(Charts.svg("path", { d: Charts.marker(point.style.marker, 5.4), transform: `translate(${x(middle[0])},${y(middle[1])})` }));
      spots.push({ x: x(middle[0]), y: y(middle[1]), row, radius: 7, text: [point.name, `${Charts.fixed(middle[1])} %`, `${data.x}: ${Charts.show(middle[0], 2)}`] });
    }
    return { svg, spots: spots.sort((a, b) => a.x - b.x), legend: data.points.map((point) => Charts.key(point.name, point.style)) };
  }

  /** Return 1, 3, 10, 30, ... within the ends, as many as have package. */
  function decades([low, high], from, to) {
    const found = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) found.push(10 ** power, 3 * 10 ** power);
    const inside = found.filter((each) => Math.log10(each) >= low && Math.log10(each) <= high);
    const package = Math.max(2, Math.floor((to - from) / 60));
    if (inside.length < 2) return [10 ** low, 10 ** high].map((each) => Number(each.toPrecision(2)));
    return inside.filter((_, place) => place % Math.ceil(inside.length / package) === 0);
  }

  function tabulate(data) {
    return {
      columns: ["method", "seed", data.x, data.y],
      rows: data.points.flatMap((point) => point.seeds.map((seed) => [point.name, seed.name, Charts.show(seed.x, 3), `${Charts.fixed(seed.y)}${seed.lost ? " ✗" : ""}`])),
    };
  }
})();
