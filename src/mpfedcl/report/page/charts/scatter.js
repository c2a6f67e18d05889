"use strict";
/*
 * Charts.scatter(element, { title, description, x, y, points, labels, columns, bounds })
 * points: [{ x, y, color, kind: "prototype" | "before" | "sample", size?: 0 to 1, text, cells }]
 * "before" is where a prototype was a while ago: seen, but neither pointed at nor in the table.
 * labels: [{ x, y, color, text }]; bounds: { x: [low, high], y: [low, high] }, the same whatever
 * is filtered; columns and a point's cells make the table.
 */
(() => {
  Charts.scatter = (element, data) => {
    Charts.frame(element, data, (width) => draw(data, width), () => ({
      columns: data.columns,
      rows: data.points.filter((point) => point.kind !== "before").map((point) => point.cells),
    }));
  };

  function draw(data, width) {
    const height = Math.max(300, Math.min(520, width * 0.62));
    const area = { left: 14, right: width - 14, top: 30, bottom: height - 30 };
    const svg = Charts.canvas(width, height);
    const x = Charts.scale(widen(data.bounds.x), [area.left, area.right]);
    const y = Charts.scale(widen(data.bounds.y), [area.bottom, area.top]);
    svg.append(
      Charts.svg("rect", { class: "field", x: area.left, y: area.top, width: area.right - area.left, height: area.bottom - area.top }),
      Charts.svg("text", { class: "axis-title", x: area.right, y: height - 10, "text-anchor": "end" }, data.x),
      Charts.svg("text", { class: "axis-title", x: area.left, y: 18 }, data.y),
    );
    const spots = [];
    // Prototypes lie above the rest.
    const ordered = [...data.points].sort((a, b) => (a.kind === "prototype" ? 1 : 0) - (b.kind === "prototype" ? 1 : 0));
    for (const point of ordered) {
      const [px, py] = [x(point.x), y(point.y)];
      if (point.kind === "before") {
        svg.append(Charts.svg("circle", { class: `before ${Charts.color(point.color)}`, cx: px.toFixed(1), cy: py.toFixed(1), r: 3.6 }));
        continue;
      }
      const radius = point.kind === "sample" ? 3 : 4 + 8 * Math.sqrt(point.size);
      svg.append(
        point.kind === "sample"
          ? Charts.svg("path", { class: `sample ${Charts.color(point.color)}`, d: "M-2.6,-2.6L2.6,2.6M-2.6,2.6L2.6,-2.6", transform: `translate(${px.toFixed(1)},${py.toFixed(1)})` })
          : Charts.svg("circle", { class: `prototype ${Charts.color(point.color)}`, cx: px.toFixed(1), cy: py.toFixed(1), r: radius.toFixed(1) }),
      );
      spots.push({ x: px, y: py, radius, text: point.text });
    }
    name(svg, data.labels.map((label) => ({ ...label, x: x(label.x), y: y(label.y) })), area);
    return { svg, spots: spots.sort((a, b) => a.x - b.x), legend: legend(data) };
  }

  /** Write the names of classes where their prototypes are, moved apart where they would overlap. */
  function name(svg, labels, area) {
    const placed = [];
    for (const label of labels) {
      const text = Charts.fit(label.text, 110);
      const half = 4 + Array.from(text).length * 3.8;
      const x = Math.max(area.left + half, Math.min(area.right - half, label.x));
      const above = label.y - 20;
      let y = above;
      const overlaps = (at) => placed.some((other) => Math.abs(other.x - x) < other.half + half && Math.abs(other.y - at) < 17);
      for (let tries = 1; overlaps(y) && tries < 40; tries += 1) {
        y = above + (tries % 2 ? -1 : 1) * Math.ceil(tries / 2) * 9;
      }
      y = Math.max(area.top + 12, Math.min(area.bottom - 6, y));
      placed.push({ x, y, half });
      svg.append(
        Charts.svg("rect", { class: `plate ${Charts.color(label.color)}`, x: x - half, y: y - 9, width: 2 * half, height: 17, rx: 4 }),
        Charts.svg("text", { class: "plate-text", x, y: y + 4, "text-anchor": "middle" }, text),
      );
    }
  }

  function legend(data) {
    const has = (kind) => data.points.some((point) => point.kind === kind);
    const key = (shape, text) =>
      Charts.html(
        "span",
        { class: "key" },
        Charts.svg("svg", { class: "swatch", width: 18, height: 14, viewBox: "-9 -7 18 14", "aria-hidden": "true" }, shape),
        text,
      );
    return [
      has("prototype") ? key(Charts.svg("circle", { class: "prototype color-6", r: 6 }), "prototype (larger: more training images)") : null,
      has("before") ? key(Charts.svg("circle", { class: "before color-6", r: 4 }), "where one was before") : null,
      has("sample") ? key(Charts.svg("path", { class: "sample color-6", d: "M-3,-3L3,3M-3,3L3,-3" }), "test image") : null,
    ].filter(Boolean);
  }

  function widen([low, high]) {
    const package = (high - low || 1) * 0.06;
    return [low - room, high + package];
  }
})();
