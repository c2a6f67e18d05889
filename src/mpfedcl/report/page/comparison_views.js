"use strict";
/* What a report shows of several methods beyond their means: seeds, differences, costs, clients. */
(() => {
  const { html } = Charts;
  const { block, choice, controls, ready, sentence } = Parts;
  const TESTS = { own: "the clients' local test sets", union: "global test set images" };
  const LOST = " ✗: a seed that diverged.";

  const isShared = (groups) => groups.every((group) => group.shared_test);
  const nameTest = (groups, test) => (isShared(groups) ? "the test" : TESTS[test]);
  /** Return a choice of the test; none where all clients share one. */
  const chooseTest = (groups, changed) => (isShared(groups) ? null : choice("Test", Object.entries(TESTS), changed));
  const anyLost = (groups) => (groups.some((group) => group.diverged.some(Boolean)) ? LOST : "");
  const dots = (group, values) => values.map((value, place) => ({ value, name: `seed ${group.seeds[place]}`, lost: group.diverged[place] }));

  /** Every seed of every method. */
  Views.seeds = (groups) => {
    const chart = html("div");
    let test = "local_test";
    const draw = () => {
      const rows = groups.map((group) => {
        const known = group.end[test].filter((value) => value !== null);
        const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
        const std = known.length > 1 ? Math.sqrt(known.reduce((sum, each) => sum + (each - mean) ** 2, 0) / (known.length - 1)) : null;
        return { name: group.name, style: group.style, mean, low: std === null ? null : mean - std, high: std === null ? null : mean + std, dots: dots(group, group.end[test]) };
      });
      Charts.intervals(chart, {
        title: `Every seed on ${nameTest(groups, test)}`,
        description: `Accuracy in % of the last round. Small dot: one seed; marker: mean; bar: one standard deviation over seeds each way (ddof 1).${anyLost(groups)}`,
        x: "accuracy (%)", low: 0, high: 100, wide: true, span: "mean ± std", rows,
      });
    };
    return ready(block("Seed by seed", null, controls(chooseTest(groups, (value) => { test = value; draw(); })), chart), draw);
  };

  /** Differences paired by seed, with their intervals. */
  Views.differences = (groups, found) => {
    const chart = html("div");
    const state = { test: "local_test", to: "first" };
    const set = (name, value) => { state[name] = value; draw(); };
    const draw = () => {
      const { reference, rows } = found.tests[state.test][state.to] || found.tests[state.test].first;
      const name = groups[reference].name;
      const bar = found.seeds.length > 1 ? `bar: ${Charts.show(found.level)} % interval of the mean difference (Student's t, paired by seed)` : "one seed has no interval";
      const gone = rows.some((row) => row.lost.includes(true)) ? " ✗: one of the two diverged; at the left edge it has no number." : "";
      Charts.intervals(chart, {
        title: `Points above ${name} on ${nameTest(groups, state.test)}`,
        description: `Reference: ${name}${state.to === "best" ? ", which has the best mean; that it was chosen by these numbers flatters it" : ""}. Small dot: one seed; marker: mean; ${bar}.${gone}`,
        x: `points of accuracy above ${name}`, zero: true, signed: true, span: `${Charts.show(found.level)} % interval`,
        rows: rows.map((row) => ({
          name: groups[row.group].name, style: groups[row.group].style, mean: row.mean, low: row.low, high: row.high,
          dots: row.seeds.map((value, place) => ({ value, name: `seed ${found.seeds[place]}`, lost: row.lost[place] })),
        })),
      });
    };
    const references = [["first", `${groups[0].name}, the first named`], ["best", "the best mean"]];
    return ready(block("Differences between methods", null, controls(chooseTest(groups, (value) => set("test", value)), choice("Reference", references, (value) => set("to", value))), chart), draw);
  };

  /** Accuracy against megabytes and against seconds. */
  Views.worth = (groups) => {
    const [sent, spent] = [html("div"), html("div")];
    let test = "local_test";
    const draw = () => {
      const points = (cost, factor) => groups.map((group) => ({
        name: group.name, style: group.style,
        seeds: group.end[test].map((value, place) => ({ x: group.costs[place][cost] * factor, y: value, name: group.seeds[place], lost: group.diverged[place] })),
      }));
      const description = `On ${nameTest(groups, test)}. Small dot: one seed; marker: mean. The axis below is logarithmic.${anyLost(groups)}`;
      Charts.points(sent, { title: "Accuracy against megabytes sent", description, x: "megabytes", y: "accuracy (%)", high: 100, points: points("bytes", 1e-6) });
      Charts.points(spent, { title: "Accuracy against seconds of training", description, x: "seconds", y: "accuracy (%)", high: 100, points: points("seconds", 1) });
    };
    return ready(block("What accuracy costs", null, controls(chooseTest(groups, (value) => { test = value; draw(); })), html("div", { class: "pair" }, sent, spent)), draw);
  };

  /** Accuracy per client, a row per method. */
  Views.clientHeat = (groups, heat) => {
    const chart = html("div");
    return ready(block("Who is served worst", null, chart), () => {
      Charts.heat(chart, {
        title: "Accuracy of clients on their local test sets",
        description: `In %: ${heat.about}. The darker, the worse.`, x: "from worst to best",
        rows: groups.map((group) => group.name), columns: heat.columns, values: heat.values,
      });
    });
  };

  /** Reliability diagrams of whoever is judged by probabilities. */
  Views.reliability = (groups) => {
    const title = "Can its probabilities be believed?";
    const known = (test) => groups.filter((group) => group.calibration[test]);
    if (!known("local_test").length && !known("global_test").length) {
      return ready(block(title, null, sentence("No reliability diagram: nothing here is judged by probabilities, or the runs are unfinished, over a network, or of an older version.")));
    }
    const chart = html("div");
    let test = known("local_test").length ? "local_test" : "global_test";
    const draw = () => {
      const ideal = { name: "as it should be", x: [0, 100], mean: [0, 100], plain: true, style: { color: 6, marker: 0, dash: 2 } };
      const lines = known(test).map((group) => ({
        name: `${group.name} (ECE ${group.calibration[test].error} %)`, style: { ...group.style, dash: 0 },
        x: group.calibration[test].bins.map((bin) => Math.round(1000 * bin[2]) / 10),
        mean: group.calibration[test].bins.map(([images, right]) => (100 * right) / images),
        notes: group.calibration[test].bins.map(([images]) => `${Charts.show(images)} test images`),
      }));
      if (!lines.length) { chart.replaceChildren(sentence("Nobody is judged by probabilities on this test.")); return; }
      Charts.lines(chart, {
        title: `Right answers by probability on ${nameTest(groups, test)}`,
        description: "A point is a bin of test images, of all seeds together. Below the dotted line a method is too sure of itself, above it too modest. ECE: expected calibration error, 15 bins, mean(std) over seeds.",
        x: "probability of the predicted class (%)", y: "right answers (%)", low: 0, high: 100, lines: [...lines, ideal],
      });
    };
    return ready(block(title, null, controls(isShared(groups) ? null : choice("Test", Object.entries(TESTS), (value) => { test = value; draw(); }, test)), chart), draw);
  };
})();
