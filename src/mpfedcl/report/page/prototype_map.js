"use strict";
/* The map of a run's prototypes and of some test images. */
(() => {
  const { html } = Charts;
  const { block, choice, controls, ready, sentence, toggle } = Parts;

  /** The prototype map. */
  Views.map = (run) => {
    const map = run.map;
    const title = "Map of the prototypes";
    if (map.missing) return ready(block(title, null, sentence(map.missing)));
    const state = { class: "", client: "", samples: true };
    const chart = html("div");
    const all = pointsOf(map);
    const draw = () => {
      const points = all.filter((point) =>
        (state.class === "" || point.colour === Number(state.class)) &&
        (state.client === "" || point.client === Number(state.client)) &&
        (state.samples || point.kind === "prototype"));
      const count = (kind) => points.filter((point) => point.kind === kind).length;
      const samples = map.samples ? ` and ${count("sample")} test images, embedded by ${map.embedded_by}` : "";
      const share = (map.shares[0] + map.shares[1]) * 100;
      Charts.scatter(chart, {
        title: `${count("prototype")} prototypes${samples}`,
        description: `Near each other means alike. Two directions (principal components) keep ${Charts.show(share, 0)} % of the differences. Colours and plates are classes.`,
        x: `first direction (${Charts.show(100 * map.shares[0], 0)} %)`, y: `second direction (${Charts.show(100 * map.shares[1], 0)} %)`,
        points, labels: labelsOf(points, map.classes), bounds: boundsOf(all),
        columns: ["what", "class", "client", "images", "x", "y"],
      });
    };
    const pick = (names) => [["", "all"], ...names.map((name, place) => [String(place), name])];
    return ready(
      block(
        title, null,
        controls(
          choice("Class", pick(map.classes), (value) => { state.class = value; draw(); }),
          choice("Client", pick(map.clients), (value) => { state.client = value; draw(); }),
          map.samples ? toggle("test images", true, (on) => { state.samples = on; draw(); }) : null,
        ),
        map.notes.map((note) => sentence(note)),
        chart,
      ),
      draw,
    );
  };

  function pointsOf(map) {
    const most = Math.max(1, ...map.prototypes.count);
    const make = (list, kind, place) => {
      const name = list.client[place] === null ? "several" : map.clients[list.client[place]];
      const label = map.classes[list.class[place]];
      const count = kind === "prototype" ? list.count[place] : 1;
      const what = kind === "prototype" ? "prototype" : "test image";
      return {
        x: list.x[place], y: list.y[place], kind, colour: list.class[place], client: list.client[place],
        size: count / most, cells: [what, label, name, count, list.x[place], list.y[place]],
        text: [`${what} of class ${label}`, list.client[place] === null ? "several clients are tested on it" : `client ${name}`, ...(kind === "prototype" ? [`stands for ${Charts.show(count)} training images`] : [])],
      };
    };
    const each = (list, kind) => (list ? list.x.map((_, place) => make(list, kind, place)) : []);
    return [...each(map.prototypes, "prototype"), ...each(map.samples, "sample")];
  }

  /** A plate a class, at the middle of its prototypes. */
  function labelsOf(points, classes) {
    return classes.flatMap((text, colour) => {
      const own = points.filter((point) => point.kind === "prototype" && point.colour === colour);
      const middle = (axis) => own.map((point) => point[axis]).sort((a, b) => a - b)[Math.floor(own.length / 2)];
      return own.length ? [{ text, colour, x: middle("x"), y: middle("y") }] : [];
    });
  }

  function boundsOf(points) {
    const range = (axis) => points.reduce(([low, high], point) => [Math.min(low, point[axis]), Math.max(high, point[axis])], [Infinity, -Infinity]);
    return { x: range("x"), y: range("y") };
  }
})();
