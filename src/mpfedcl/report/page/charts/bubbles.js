"use strict";
/*
 * Charts.bubbles(element, { title, description, x, y, unit, rows, columns, values, notes? })
 * Who has how much of what: a bubble in each row and column; its area is the number.
 */
(() => {
  const MANY = 30;

  Charts.bubbles = (element, data) => {
    Charts.frame(element, data, (width) => draw(data, width), () => ({
      columns: [data.y, ...data.columns, "total"],
      rows: data.rows.map((name, row) => [name, ...data.values[row], sum(data.values[row])]),
    }));
  };

  const sum = (list) => list.reduce((a, b) => a + b, 0);

  function draw(data, width) {
    const longest = Math.max(...data.rows.map((name) => Array.from(name).length), 4);
    const left = Math.min(width * 0.32, 16 + longest * 7.4);
    const right = width - 52;
    const step = (right - left) / Math.max(1, data.columns.length);
    const height = data.rows.length > MANY ? 20 : Math.max(28, Math.min(44, step));
    const turned = data.columns.some((name) => Array.from(name).length * 7 > step);
    const top = turned ? 24 + Math.min(66, 8 + 6.4 * Math.max(...data.columns.map((name) => Array.from(name).length))) : 34;
    const bottom = top + data.rows.length * height;
    const svg = Charts.canvas(width, bottom + 12);
    const biggest = Math.max(1, ...data.values.map((row) => Math.max(0, ...row)));
    const reach = Math.max(2, Math.min(step, height) / 2 - 1);
    svg.append(Charts.svg("text", { class: "axis-title", x: left - 8, y: 14, "text-anchor": "end" }, data.y));
    svg.append(Charts.svg("text", { class: "axis-title", x: left, y: 14 }, data.x));
    svg.append(Charts.svg("text", { class: "axis-title", x: width, y: 14, "text-anchor": "end" }, "total"));
    heads(svg, data, { left, step, top, turned });
    const spots = [];
    data.rows.forEach((name, row) => {
      const y = top + (row + 0.5) * height;
      svg.append(
        Charts.svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
        Charts.svg("text", { class: "tick", x: left - 8, y: y + 4, "text-anchor": "end" }, Charts.fit(name, left - 10)),
        Charts.svg("text", { class: "value", x: width, y: y + 4, "text-anchor": "end" }, Charts.show(sum(data.values[row]))),
      );
      data.values[row].forEach((value, column) => {
        const x = left + (column + 0.5) * step;
        // The area speaks, so that twice as many look like twice as much.
        const radius = value ? Math.max(1.5, reach * Math.sqrt(value / biggest)) : 0;
        if (value) svg.append(Charts.svg("circle", { class: "bubble", cx: x, cy: y, r: radius }));
        if (value && reach >= 13) number(svg, value, x, y, radius, reach);
        spots.push({
          x, y, row, radius,
          box: [x - step / 2, y - height / 2, step, height],
          text: [name, `${data.x} ${data.columns[column]}: ${Charts.show(value)} ${data.unit}`],
        });
      });
    });
    return { svg, spots, tall: data.rows.length > MANY };
  }

  function heads(svg, data, { left, step, top, turned }) {
    const every = Math.max(1, Math.ceil(16 / step));
    data.columns.forEach((name, column) => {
      if (column % every) return;
      const x = left + (column + 0.5) * step;
      const place = turned ? { transform: `translate(${x + 4},${top - 6}) rotate(-60)` } : { x, y: top - 6, "text-anchor": "middle" };
      svg.append(Charts.svg("text", { class: "tick", ...place }, turned ? Charts.fit(name, 74) : name));
    });
  }

  function number(svg, value, x, y, radius, reach) {
    const text = Charts.show(value);
    const inside = text.length * 7 < 2 * radius - 3;
    const beside = Math.min(radius + 4, reach - 1);
    svg.append(
      Charts.svg(
        "text",
        inside
          ? { class: "value on-heat", x, y: y + 4, "text-anchor": "middle" }
          : { class: "value small", x: x + beside, y: y - Math.min(radius, 6) + 2 },
        text,
      ),
    );
  }
})();
