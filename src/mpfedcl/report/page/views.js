"use strict";
/* What a report shows of groups of runs and of one run, each as a block. */
const Views = {};

(() => {
  const { html } = Charts;
  const { block, choice, controls, copy, sentence, toggle } = Parts;
  const READINGS = {
    personal_classifier: "personal, classifier",
    personal_prototype: "personal, prototype",
    averaged_classifier: "averaged, classifier",
    averaged_prototype: "averaged, prototype",
  };
  const TESTS = { own: "the clients' own tests", union: "everybody's test images" };

  /** Accuracy or loss per round; a line a group, or a line a reading where there is one group. */
  Views.rounds = (groups) => {
    const state = { measure: "accuracy", test: "own", reading: "judged" };
    const chart = html("div");
    const alone = groups.length === 1;
    const every = alone ? "all four" : "the one each is judged by";
    const tests = choice("Test", Object.entries(TESTS), (value) => set("test", value));
    const readings = choice("Reading", [["judged", every], ...Object.entries(READINGS)], (value) => set("reading", value));
    const set = (name, value) => { state[name] = value; draw(); };
    const draw = () => {
      const isLoss = state.measure === "loss";
      for (const each of [tests, readings]) each.hidden = isLoss;
      const lines = isLoss ? lossLines(groups) : accuracyLines(groups, state, alone);
      if (!lines.length) {
        chart.replaceChildren(sentence("No run here has this reading."));
        return;
      }
      const spread = lines.some((line) => line.std) ? " The band is one standard deviation over seeds." : "";
      const read = state.reading === "judged" ? (alone ? "all readings" : "each method by its own reading") : `by the reading ${READINGS[state.reading]}`;
      Charts.lines(chart, {
        title: isLoss ? "Training loss per round" : `Accuracy per round on ${TESTS[state.test]}`,
        description: isLoss ? `Mean over the clients that trained; methods have different losses.${spread}` : `In %, ${read}.${spread}`,
        x: "round", y: isLoss ? "loss" : "accuracy (%)", digits: isLoss ? 3 : 1,
        low: 0, high: isLoss ? undefined : 100, lines,
      });
    };
    const measures = choice("Show", [["accuracy", "accuracy"], ["loss", "loss"]], (value) => set("measure", value));
    return ready(block("Round by round", null, controls(measures, tests, readings), chart), draw);
  };

  function accuracyLines(groups, { test, reading }, alone) {
    if (alone && reading === "judged") {
      return Object.entries(groups[0].curves.accuracy[test]).map(([name, curve]) => ({
        name: READINGS[name] + (name === groups[0].reading ? " (judged by this)" : ""), ...curve,
      }));
    }
    return groups.flatMap((group) => {
      const curve = group.curves.accuracy[test][reading === "judged" ? group.reading : reading];
      return curve ? [{ name: group.name, ...curve }] : [];
    });
  }

  const lossLines = (groups) =>
    groups.flatMap((group) => (group.curves.loss ? [{ name: group.name, ...group.curves.loss }] : []));

  /** Seconds by phase and bytes by direction, of a whole run. */
  Views.cost = (groups) => {
    const seconds = html("div");
    const bytes = html("div");
    const several = groups.length > 1;
    const mean = groups.some((group) => group.runs.length > 1) ? ", mean over seeds" : "";
    const bars = (field, factor) => {
      const names = [...new Set(groups.flatMap((group) => Object.keys(group[field])))];
      const used = names.filter((name) => groups.some((group) => group[field][name] > 0));
      const value = (group, name) => (group[field][name] || 0) * factor;
      if (several) return { parts: used, bars: groups.map((group) => ({ name: group.name, values: used.map((name) => value(group, name)) })) };
      return { parts: ["a run"], bars: used.map((name) => ({ name, values: [value(groups[0], name)] })) };
    };
    return ready(block("What it costs", null, html("div", { class: "pair" }, seconds, bytes)), () => {
      Charts.bars(seconds, {
        title: "Seconds by phase", description: `Wall time of a whole run${mean}; evaluate is not part of the method.`,
        unit: "s", digits: 2, ...bars("seconds", 1),
      });
      Charts.bars(bytes, {
        title: "Megabytes sent", description: `All clients and rounds of a run${mean}: up to the server, down to the clients.`,
        unit: "MB", digits: 2, ...bars("bytes", 1e-6),
      });
    });
  };

  /** Who is left behind: accuracy by client and by class. */
  Views.behind = (run) => {
    const clients = html("div");
    const classes = html("div");
    const known = run.clients.filter((client) => client.accuracy !== null);
    const tested = (run.confusion.by_class || []).filter((each) => each.tested);
    const worst = lowest(known);
    const hardest = lowest(tested);
    const mean = known.length ? known.reduce((sum, each) => sum + each.accuracy, 0) / known.length : null;
    const told = html("p", { class: "finding" });
    if (worst) {
      const below = Charts.show(mean - worst.accuracy);
      told.append(html("strong", {}, worst.name), ` is the client furthest behind: ${Charts.show(worst.accuracy)} %, ${below} points below the mean of ${Charts.show(mean)} %.`);
    }
    if (hardest) told.append(" The hardest class is ", html("strong", {}, hardest.name), ` with ${Charts.show(hardest.accuracy)} %.`);
    const read = `${READINGS[run.reading]}, clients' own tests, round ${run.read_in}`;
    return ready(
      block("Who is left behind", null, told, html("div", { class: "pair" }, clients, classes)),
      () => {
        if (run.clients.length) {
          Charts.bars(clients, {
            title: "Accuracy by client", description: `In %, ${read}.`, unit: "%", most: 100, parts: ["accuracy"],
            reference: mean === null ? null : { value: mean, name: "mean" },
            bars: run.clients.map((each) => ({
              name: each.name, values: [each.accuracy], worst: each === worst,
              note: each.train === null ? null : `${Charts.show(each.train)} training, ${Charts.show(each.test)} test images`,
            })),
          });
        }
        if (run.confusion.missing) classes.replaceChildren(sentence(run.confusion.missing));
        else {
          Charts.bars(classes, {
            title: "Accuracy by class", description: "In %, over all clients' own tests together.", unit: "%", most: 100, parts: ["accuracy"],
            bars: run.confusion.by_class.map((each) => ({
              name: each.name, values: [each.tested ? each.accuracy : null], worst: each === hardest,
              note: `${Charts.show(each.tested)} test images`,
            })),
          });
        }
      },
    );
  };

  const lowest = (list) => list.reduce((least, each) => (least && least.accuracy <= each.accuracy ? least : each), null);

  /** Which class is taken for which. */
  Views.confusion = (run) => {
    const found = run.confusion;
    const title = "What is taken for what";
    if (found.missing) return ready(block(title, null, sentence(found.missing)), () => {});
    const state = { client: "", percent: true };
    const chart = html("div");
    const draw = () => {
      const one = state.client === "" ? null : found.clients[names[Number(state.client)]];
      const counts = one ? one.counts : found.all;
      const silent = one ? one.unanswered : found.unanswered;
      const any = silent && silent.some((count) => count > 0);
      const who = one ? `Client ${names[Number(state.client)]}` : "All clients";
      Charts.matrix(chart, {
        title: `${who}: true class against the class said`,
        description: `${state.percent ? "Percent of each row" : "Numbers of test images"}; the diagonal is right.${any ? " none: no prototype gave an answer." : ""}`,
        x: "said", y: "true", rows: found.classes, percent: state.percent,
        columns: any ? [...found.classes, "none"] : found.classes,
        counts: any ? counts.map((row, place) => [...row, silent[place]]) : counts,
      });
    };
    const names = Object.keys(found.clients);
    const options = [["", "all clients"], ...names.map((name, place) => [String(place), name])];
    return ready(
      block(
        title, null,
        controls(
          choice("Client", options, (value) => { state.client = value; draw(); }),
          choice("Numbers", [["percent", "% of the row"], ["counts", "counts"]], (value) => { state.percent = value === "percent"; draw(); }),
        ),
        found.left_out ? sentence(`Only the ${names.length} clients with the lowest accuracy can be chosen; all are in the sum.`) : null,
        chart,
      ),
      draw,
    );
  };

  /** Who holds what. */
  Views.partition = (run) => {
    const held = run.partition;
    if (held.missing) return ready(block("Who holds what", null, sentence(held.missing)), () => {});
    const chart = html("div");
    return ready(block("Who holds what", null, chart), () => {
      Charts.bubbles(chart, {
        title: "Training images by client and class", description: `${run.setting}. The area of a bubble is the number of images.`,
        x: "class", y: "client", unit: "training images", rows: held.clients.map((client) => client.name),
        columns: held.classes, values: held.clients.map((client) => client.train),
      });
    });
  };

  /** The prototype map. */
  Views.map = (run) => {
    const map = run.map;
    const title = "Map of the prototypes";
    if (map.missing) return ready(block(title, null, sentence(map.missing)), () => {});
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
      const name = list.client[place] === null ? "shared by clients" : map.clients[list.client[place]];
      const label = map.classes[list.class[place]];
      const count = kind === "prototype" ? list.count[place] : 1;
      const what = kind === "prototype" ? "prototype" : "test image";
      return {
        x: list.x[place], y: list.y[place], kind, colour: list.class[place], client: list.client[place],
        size: count / most, cells: [what, label, name, count, list.x[place], list.y[place]],
        text: [`${what} of class ${label}`, `client ${name}`, ...(kind === "prototype" ? [`stands for ${Charts.show(count)} training images`] : [])],
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

  /** Updates that were rejected, clients that did not answer. */
  Views.absences = (run) => {
    const { rows, left_out: leftOut } = run.absences;
    const title = "Rejected and missing clients";
    if (!rows.length) return ready(block(title, null, sentence("None: every chosen client answered in every round, and nothing was rejected.")), () => {});
    const table = Charts.numbers({
      caption: "Who was rejected or did not answer",
      columns: ["client", "what happened", "why", "times", "rounds"],
      rows: rows.map((row) => [row.client, row.what, row.why || "-", row.times, row.first === row.last ? row.first : `${row.first} to ${row.last}`]),
    });
    return ready(block(title, null, table, leftOut ? sentence(`${leftOut} more are left out.`) : null), () => {});
  };

  /** Every setting, the versions, and how to get the run again. */
  Views.settings = (run) => {
    const { settings } = run;
    const versions = Object.entries(settings.versions).map(([name, value]) => `${name} ${value}`).join(", ");
    return ready(
      block(
        "Run it again", null,
        settings.command ? copy(settings.command, "In one command:") : null,
        copy(settings.file_command, settings.command ? "Or from the run's own file, which holds every setting:" : "From the run's own file, which holds every setting:"),
        html("details", { class: "numbers" }, html("summary", {}, "All settings"), html("pre", { tabindex: 0, "aria-label": "All settings" }, html("code", {}, settings.toml))),
        versions ? sentence(`Made with ${versions}${settings.threads ? `; ${settings.threads} thread${settings.threads > 1 ? "s" : ""}` : ""}.`) : null,
      ),
      () => {},
    );
  };

  /** A block and how to draw it once it is on the page: only there a chart knows its width. */
  const ready = (node, draw) => ({ node, draw });
})();
