"use strict";
/*
 * Charts.heat(element, { title, description, x, rows, columns, values })
 * Accuracies in %, a row per method: the darker, the worse. What is not known has a plain cell.
 */
(() => {
  const ROW = 26;

  Charts.heat = (element, data) => {
    Charts.frame(element, data, (width) => draw(data, width), () => tabulate(data));
  };

  function draw(data, width) {
    const longest = Math.max(2, ...data.rows.map((name) => Array.from(name).length));
    const left = Math.min(width * 0.34, 14 + longest * 7.4);
    const step = (width - left - 4) / data.columns.length;
    const turned = data.columns.some((name) => Array.from(name).length * 7.2 > step);
    const most = Math.max(...data.columns.map((name) => Array.from(name).length));
    const top = turned ? 30 + Math.min(70, 8 + 6.4 * most) : 40;
    const svg = Charts.canvas(width, top + data.rows.length * ROW + 6);
    svg.append(Charts.svg("text", { class: "axis-title", x: left, y: 14 }, Charts.fit(data.x, width - left)));
    const every = Math.max(1, Math.ceil(14 / step));
    data.columns.forEach((name, column) => {
      if (column % every) return;
      const x = left + (column + 0.5) * step;
      const place = turned ? { transform: `translate(${x + 4},${top - 6}) rotate(-60)` } : { x, y: top - 8, "text-anchor": "middle" };
      svg.append(Charts.svg("text", { class: "tick", ...place }, turned ? Charts.fit(name, 84) : name));
    });
    const spots = [];
    data.rows.forEach((name, row) => {
      const y = top + row * ROW;
      svg.append(Charts.svg("text", { class: "tick", x: left - 6, y: y + ROW / 2 + 4, "text-anchor": "end" }, Charts.fit(name, left - 10)));
      data.columns.forEach((client, column) => {
        const value = data.values[row][column];
        const x = left + column * step;
        const size = { x: x + 0.5, y: y + 0.5, width: Math.max(1, step - 1), height: ROW - 1 };
        svg.append(Charts.svg("rect", { class: value === null ? "none" : "cell", ...size }));
        if (value !== null) {
          svg.append(Charts.svg("rect", { class: "heat", ...size, "fill-opacity": (1 - value / 100).toFixed(3) }));
          if (step >= 24) svg.append(Charts.svg("text", { class: `value in-cell ${value < 35 ? "on-heat" : ""}`, x: x + step / 2, y: y + ROW / 2 + 4, "text-anchor": "middle" }, Charts.show(value, 0)));
        }
        spots.push({ x: x + step / 2, y: y + ROW / 2, row, radius: 6, box: [x, y, step, ROW], text: [`${name}, ${client}`, value === null ? "not read" : `${Charts.fixed(value)} %`] });
      });
    });
    return { svg, spots, tall: data.rows.length > 24 };
  }

  function tabulate(data) {
    return {
      columns: ["method", ...data.columns],
      rows: data.rows.map((name, row) => [name, ...data.values[row].map((value) => Charts.fixed(value))]),
    };
  }
})();
