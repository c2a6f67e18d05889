"use strict";
/*
 * Charts.matrix(element, { title, description, x, y, rows, columns, counts, percent })
 * A square a pair: the darker, the larger its share of the row. `percent` shows shares, else counts.
 */
(() => {
  Charts.matrix = (element, data) => {
    Charts.frame(element, data, (width) => draw(data, width), () => tabulate(data));
  };

  const sum = (list) => list.reduce((a, b) => a + b, 0);

  function shown(data, row, column) {
    const count = data.counts[row][column];
    if (!data.percent) return Charts.show(count);
    const all = sum(data.counts[row]);
    return all ? Charts.show((100 * count) / all, 1) : "-";
  }

  function draw(data, width) {
    const longest = Math.max(...data.rows.map((name) => Array.from(name).length), 2);
    const left = 26 + Math.min(width * 0.26, 14 + longest * 7.4);
    const step = Math.max(3, Math.min(data.columns.length < 6 ? 64 : 48, (width - left - 4) / data.columns.length));
    const turned = data.columns.some((name) => Array.from(name).length * 7 > step);
    const top = turned ? 36 + headroom(data.columns) : 46;
    const svg = Charts.canvas(width, top + data.rows.length * step + 8);
    const middle = top + (data.rows.length * step) / 2;
    svg.append(
      Charts.svg("text", { class: "axis-title", x: left, y: 14 }, data.x),
      Charts.svg("text", { class: "axis-title", transform: `translate(14,${middle}) rotate(-90)`, "text-anchor": "middle" }, data.y),
    );
    const every = Math.max(1, Math.ceil(13 / step));
    data.columns.forEach((name, column) => {
      if (column % every) return;
      const x = left + (column + 0.5) * step;
      const place = turned ? { transform: `translate(${x + 4},${top - 8}) rotate(-60)` } : { x, y: top - 8, "text-anchor": "middle" };
      svg.append(Charts.svg("text", { class: "tick", ...place }, turned ? Charts.fit(name, 80) : name));
    });
    const spots = [];
    data.rows.forEach((name, row) => {
      const all = sum(data.counts[row]);
      const y = top + row * step;
      if (row % every === 0) {
        svg.append(Charts.svg("text", { class: "tick", x: left - 6, y: y + step / 2 + 4, "text-anchor": "end" }, Charts.fit(name, left - 34)));
      }
      data.columns.forEach((said, column) => {
        const count = data.counts[row][column];
        const share = all ? count / all : 0;
        const x = left + column * step;
        cell(svg, { x, y, step, share, right: row === column });
        if (step >= 24 && count) {
          const text = data.percent ? (share < 0.005 ? "<1" : Charts.show(100 * share, 0)) : Charts.show(count);
          const fits = text.length * 6.4 <= step;
          svg.append(Charts.svg("text", { class: `value in-cell ${share > 0.6 ? "on-heat" : ""} ${fits ? "" : "small"}`, x: x + step / 2, y: y + step / 2 + 4, "text-anchor": "middle" }, text));
        }
        spots.push({
          x: x + step / 2, y: y + step / 2, row, radius: step / 2 - 3, box: [x, y, step, step],
          text: [`${data.y} ${name}, ${data.x} ${said}`, `${Charts.show(count)} of ${Charts.show(all)} (${Charts.show(100 * share, 1)} %)`],
        });
      });
    });
    return { svg, spots };
  }

  /** Return how high names stand that are turned by 60 degrees. */
  const headroom = (names) => Math.min(66, 8 + 6.4 * Math.max(...names.map((name) => Array.from(name).length)));

  function cell(svg, { x, y, step, share, right }) {
    const size = { x: x + 0.5, y: y + 0.5, width: Math.max(1, step - 1), height: Math.max(1, step - 1) };
    svg.append(Charts.svg("rect", { class: right ? "cell right" : "cell", ...size }));
    if (share > 0) {
      svg.append(Charts.svg("rect", { class: right ? "heat good" : "heat", ...size, "fill-opacity": (share ** 0.8).toFixed(3) }));
    }
  }

  function tabulate(data) {
    return {
      columns: [`${data.y} \\ ${data.x}`, ...data.columns],
      rows: data.rows.map((name, row) => [name, ...data.columns.map((_, column) => shown(data, row, column))]),
    };
  }
})();
