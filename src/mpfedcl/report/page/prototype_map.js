"use strict";
/* The map of a run's prototypes: at its end with some test images, or over its rounds. */
(() => {
  const { html } = Charts;
  const { block, choice, controls, ready, sentence, slider, toggle } = Parts;

  /** The prototype map. With `frames`, a round each, it has a slider; they share directions and scale. */
  Views.map = (run) => {
    let map = run.map;
    const title = "Map of the prototypes";
    if (map.missing) return ready(block(title, null, sentence(map.missing)));
    const state = { class: "", client: "", samples: true, at: Infinity };
    const chart = html("div");
    const notes = html("div");
    const draw = () => {
      const last = map.frames ? map.frames.length - 1 : 0;
      const at = Math.min(state.at, last);
      const all = pointsOf(map, at);
      const points = all.filter((point) =>
        (state.class === "" || point.color === Number(state.class)) &&
        (state.client === "" || point.client === Number(state.client)) &&
        (state.samples || point.kind !== "sample"));
      const count = (kind) => points.filter((point) => point.kind === kind).length;
      const samples = map.samples ? ` and ${count("sample")} test images, embedded by ${map.embedded_by}` : "";
      const share = (map.shares[0] + map.shares[1]) * 100;
      notes.replaceChildren(...map.notes.map((note) => sentence(note)));
      Charts.scatter(chart, {
        title: `${map.frames ? `Round ${map.frames[at].round}: ` : ""}${count("prototype")} prototypes${samples}`,
        description: `Points that are close to each other are alike. Two directions (principal components) keep ${Charts.show(share, 0)} % of the differences. Colors and plates are classes.`,
        x: `first direction (${Charts.show(100 * map.shares[0], 0)} %)`, y: `second direction (${Charts.show(100 * map.shares[1], 0)} %)`,
        points, labels: labelsOf(points, map.classes), bounds: boundsOf(map.frames || all),
        columns: ["what", "class", "client", "images", "x", "y"],
      });
    };
    const pick = (names) => [["", "all"], ...names.map((name, place) => [String(place), name])];
    const clients = choice("Client", pick(map.clients), (value) => { state.client = value; draw(); });
    const steps = () => map.frames.map((frame) => `round ${frame.round}`);
    // At the newest round the map goes on with the run.
    const rounds = map.frames ? slider("Round", steps(), (at) => { state.at = at === map.frames.length - 1 ? Infinity : at; draw(); }) : null;
    const update = (next) => {
      const known = map.clients;
      map = next.map;
      if (known.join("\n") !== map.clients.join("\n")) clients.offer(pick(map.clients));
      rounds?.offer(steps());
      draw();
    };
    return ready(
      block(
        title, null,
        controls(
          choice("Class", pick(map.classes), (value) => { state.class = value; draw(); }),
          clients,
          map.samples ? toggle("test images", true, (on) => { state.samples = on; draw(); }) : null,
          rounds,
        ),
        notes,
        chart,
      ),
      draw,
      update,
    );
  };

  function pointsOf(map, at) {
    const lists = map.frames || [map.prototypes];
    const most = lists.reduce((high, list) => list.count.reduce((a, b) => Math.max(a, b), high), 1);
    const make = (list, kind, place) => {
      const name = list.client[place] === null ? "several" : map.clients[list.client[place]];
      const label = map.classes[list.class[place]];
      const count = kind === "prototype" ? list.count[place] : 1;
      const what = kind === "prototype" ? "prototype" : "test image";
      return {
        x: list.x[place], y: list.y[place], kind, color: list.class[place], client: list.client[place],
        size: count / most, cells: [what, label, name, count, list.x[place], list.y[place]],
        text: [`${what} of class ${label}`, list.client[place] === null ? "several clients are tested on it" : `client ${name}`, ...(kind === "prototype" ? [`stands for ${Charts.show(count)} training images`] : [])],
      };
    };
    const each = (list, kind) => (list ? list.x.map((_, place) => make(list, kind, place)) : []);
    if (map.frames) return [...each(map.frames[at], "prototype"), ...each(map.frames[at - 1], "before")];
    return [...each(map.prototypes, "prototype"), ...each(map.samples, "sample")];
  }

  /** A plate a class, at the middle of its prototypes. */
  function labelsOf(points, classes) {
    return classes.flatMap((text, color) => {
      const own = points.filter((point) => point.kind === "prototype" && point.color === color);
      const middle = (axis) => own.map((point) => point[axis]).sort((a, b) => a - b)[Math.floor(own.length / 2)];
      return own.length ? [{ text, color, x: middle("x"), y: middle("y") }] : [];
    });
  }

  /** Return the range of points, or of lists of points. */
  function boundsOf(list) {
    const range = (axis) => list.reduce(([low, high], each) => {
      const values = [each[axis]].flat();
      return [values.reduce((a, b) => Math.min(a, b), low), values.reduce((a, b) => Math.max(a, b), high)];
    }, [Infinity, -Infinity]);
    return { x: range("x"), y: range("y") };
  }
})();
