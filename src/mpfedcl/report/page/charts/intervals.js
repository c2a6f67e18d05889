"use strict";
/*
 * Charts.intervals(element, { title, description, x, rows, low?, high?, zero?, wide?, signed?, span })
 * A row per method: every seed a dot, the mean a marker, and a bar from low to high, of which `span`
 * says what it is. rows: [{ name, style, mean, low, high, dots: [{ value, name, lost? }] }]. A dot
 * without a value is a cross at the left edge, one that is lost a cross at its place. `zero` draws
 * the line of no difference, `wide` makes bars broad and pale.
 */
(() => {
  const ROW = 30;
  const GAP = 12;

  Charts.intervals = (element, data) => {
    Charts.frame(element, data, (width) => draw(data, width), () => tabulate(data));
  };

  const say = (data, value) => (value === null ? "-" : `${data.signed && value > 0 ? "+" : ""}${Charts.fixed(value)}`);

  function draw(data, width) {
    const longest = Math.max(0, ...data.rows.map((row) => Array.from(row.name).length));
    const left = Math.min(width * 0.36, 16 + longest * 7.4);
    const written = width > 620;
    const area = { left, right: width - (written ? 150 : 14), top: 10, bottom: 10 + data.rows.length * ROW };
    const svg = Charts.canvas(width, area.bottom + 44);
    const all = data.rows.flatMap((row) => [row.low, row.high, row.mean, ...row.dots.map((dot) => dot.value)]).filter((each) => each !== null);
    const clamp = (value) => Math.max(data.low ?? -Infinity, Math.min(data.high ?? Infinity, value));
    const gone = Math.max(0, ...data.rows.map((row) => row.dots.filter((dot) => dot.value === null).length));
    const domain = data.zero ? widen([...all, 0]) : Charts.range(all.map(clamp), { low: data.low ?? -Infinity, high: data.high ?? Infinity });
    const x = Charts.scale(domain, [area.left + 10 + GAP * gone, area.right - 6]);
    for (const each of Charts.ticks(...domain, Math.max(2, Math.floor(width / 130)))) {
      svg.append(
        Charts.svg("line", { class: "grid", x1: x(each), x2: x(each), y1: area.top, y2: area.bottom }),
        Charts.svg("text", { class: "tick", x: x(each), y: area.bottom + 16, "text-anchor": "middle" }, Charts.show(each, 3)),
      );
    }
    if (data.zero) svg.append(Charts.svg("line", { class: "zero", x1: x(0), x2: x(0), y1: area.top - 4, y2: area.bottom }));
    svg.append(Charts.svg("text", { class: "axis-title", x: (area.left + area.right) / 2, y: area.bottom + 36, "text-anchor": "middle" }, data.x));
    const spots = data.rows.flatMap((row, place) => {
      const y = area.top + (place + 0.5) * ROW;
      svg.append(Charts.svg("text", { class: "tick", x: area.left - 8, y: y + 4, "text-anchor": "end" }, Charts.fit(row.name, left - 10)));
      if (written) svg.append(Charts.svg("text", { class: "value", x: area.right + 8, y: y + 4 }, numbers(data, row)));
      return mark(svg, data, row, place, (value) => x(clamp(value)), y, area);
    });
    return { svg, spots };
  }

  function mark(svg, data, row, place, x, y, area) {
    const group = Charts.svg("g", { class: `mark-dot ${Charts.color(row.style.color)}` });
    const spots = [];
    if (row.low !== null && row.high !== null) {
      group.append(Charts.svg("line", { class: data.wide ? "bar-wide" : null, x1: x(row.low), x2: x(row.high), y1: y, y2: y }));
      for (const end of data.wide ? [] : [row.low, row.high]) group.append(Charts.svg("line", { x1: x(end), x2: x(end), y1: y - 4, y2: y + 4 }));
    }
    svg.append(group);
    let gone = 0;
    for (const dot of row.dots) {
      const at = dot.value === null ? area.left + 6 + GAP * gone++ : x(dot.value);
      const level = y + 8;
      if (dot.value === null || dot.lost) svg.append(Charts.cross(at, level));
      else group.append(Charts.svg("circle", { cx: at, cy: level, r: 2.6 }));
      const told = dot.value === null ? "no number" : say(data, dot.value);
      spots.push({ x: at, y: level, row: place, radius: 4, text: [row.name, `${dot.name}: ${told}${dot.lost ? ", diverged" : ""}`] });
    }
    if (row.mean !== null) {
      group.append(Charts.svg("path", { d: Charts.marker(row.style.marker, 4.6), transform: `translate(${x(row.mean)},${y - 1})` }));
      spots.push({ x: x(row.mean), y, row: place, radius: 6, text: [row.name, `mean ${say(data, row.mean)}`, row.low === null ? "no interval of one seed" : `${data.span} ${say(data, row.low)} to ${say(data, row.high)}`] });
    }
    return spots.sort((a, b) => a.x - b.x);
  }

  function widen(values) {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const package = (high - low || 1) * 0.04;
    return [low - room, high + package];
  }

  const numbers = (data, row) => (row.low === null ? say(data, row.mean) : `${say(data, row.mean)} [${say(data, row.low)}, ${say(data, row.high)}]`);

  function tabulate(data) {
    const names = data.rows.length ? data.rows[0].dots.map((dot) => dot.name) : [];
    return {
      columns: ["method", "mean", `${data.span}, from`, "to", ...names],
      rows: data.rows.map((row) => [row.name, say(data, row.mean), say(data, row.low), say(data, row.high), ...row.dots.map((dot) => `${say(data, dot.value)}${dot.lost ? " ✗" : ""}`)]),
    };
  }
})();
