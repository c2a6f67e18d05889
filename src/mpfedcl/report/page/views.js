"use strict";
/* What a report shows of groups of runs and of one run, each as a block. */
const Views = {};

(() => {
  const { html } = Charts;
  const { block, choice, controls, copy, ready, sentence } = Parts;
  const PREDICTORS = {
    personal_classifier: "personal, classifier",
    personal_prototype: "personal, prototype",
    global_classifier: "global, classifier",
    global_prototype: "global, prototype",
    personal_classifier_prior: "personal, classifier + prior",
    global_classifier_prior: "global, classifier + prior",
    global_prototype_prior: "global, prototype + prior",
    global_classifier_estimated: "global, classifier + estimated prior",
  };
  const percent = (value) => `${Charts.fixed(value)}\u00a0%`;
  const AXES = { round: "round", virtual_seconds: "virtual seconds", megabytes: "megabytes sent" };
  const TESTS = { own: "the clients' local test sets", union: "global test set images" };

  /** Accuracy per round or over what it costs, or loss per round; a line a group, or a line a predictor where there is one group. */
  Views.rounds = (given) => {
    let groups = given;
    const state = { measure: "accuracy", test: "local_test", predictor: "judged", axis: "round" };
    const chart = html("div");
    const alone = groups.length === 1;
    const every = alone ? "all of them" : "the one each is judged by";
    const tests = choice("Test", Object.entries(TESTS), (value) => set("test", value));
    const predictors = choice("Reading", [["judged", every], ...Object.entries(PREDICTORS)], (value) => set("predictor", value));
    const axes = choice("Over", axesOf(groups), (value) => set("axis", value));
    const set = (name, value) => { state[name] = value; draw(); };
    const draw = () => {
      const isLoss = state.measure === "loss";
      for (const each of [predictors, axes]) each.hidden = isLoss;
      tests.hidden = isLoss || isShared(groups);
      const axis = isLoss ? "round" : state.axis;
      const known = groups.filter((group) => group.costs_by_round[axis]);
      const lines = isLoss ? lossLines(groups) : accuracyLines(known, state, alone);
      if (!lines.length) {
        chart.replaceChildren(sentence("No run here has this predictor."));
        return;
      }
      const over = axis === "round" ? "per round" : `over ${AXES[axis]}`;
      const apart = isLoss || known.length === groups.length ? "" : " Runs without a virtual clock are left out.";
      const spread = lines.some((line) => line.std) ? " The band is one standard deviation over seeds (ddof 1)." : "";
      const lost = lines.some((line) => line.lost) ? " ✗ at the foot: a seed has no number there, because it diverged." : "";
      const read = state.predictor === "judged" ? (alone ? "all predictors" : "each method by its own predictor") : `by the predictor ${PREDICTORS[state.predictor]}`;
      Charts.lines(chart, {
        title: isLoss ? "Training loss per round" : `Accuracy ${over} on ${isShared(groups) ? "the test" : TESTS[state.test]}`,
        description: isLoss ? `Mean over the clients that trained; methods have different losses.${spread}${lost}` : `In %, ${read}.${spread}${lost}${apart}`,
        x: AXES[axis], y: isLoss ? "loss" : "accuracy (%)", digits: isLoss ? 3 : 1,
        low: 0, high: isLoss ? undefined : 100, lines,
      });
    };
    const measures = choice("Show", [["accuracy", "accuracy"], ["loss", "loss"]], (value) => set("measure", value));
    return ready(block("Round by round", null, controls(measures, axes, tests, predictors), chart), draw, (next) => { groups = next; axes.offer(axesOf(groups)); draw(); });
  };

  /** Whether all clients share one test. */
  const isShared = (groups) => groups.every((group) => group.shared_test);

  /** What accuracies can be drawn over: not all runs have a virtual clock. */
  const axesOf = (groups) => Object.entries(AXES).filter(([axis]) => groups.some((group) => group.costs_by_round[axis]));

  function accuracyLines(groups, { test, predictor, axis }, alone) {
    // One exchange holds for every round; what it costs is a single point.
    const place = (group, curve) => ({ level: group.one_shot && axis === "round", ...curve, x: moved(curve.x, group.costs_by_round, axis) });
    if (alone && predictor === "judged") {
      // What only the last round has read is in the table; a point is no curve.
      const isDrawn = (curve, all) => curve.x.length > 1 || Object.values(all).every((each) => each.x.length === 1);
      const drawn = (all) => Object.entries(all).filter(([, curve]) => isDrawn(curve, all));
      return groups.flatMap((group) => drawn(group.curves.accuracy[test]).map(([name, curve]) => ({
        name: PREDICTORS[name] + (name === group.judged_by[test] ? " (judged by this)" : ""), ...place(group, curve),
      })));
    }
    return groups.flatMap((group) => {
      const curve = group.curves.accuracy[test][predictor === "judged" ? group.judged_by[test] : predictor];
      return curve ? [{ name: group.one_shot ? `${group.name} (no rounds)` : group.name, style: group.style, ...place(group, curve) }] : [];
    });
  }

  /** Return for each round what was spent by its end. */
  function moved(rounds, costs, axis) {
    const places = new Map(costs.round.map((round, place) => [round, place]));
    return rounds.map((round) => costs[axis][places.get(round)]);
  }

  const lossLines = (groups) =>
    groups.flatMap((group) => (group.curves.loss ? [{ name: group.name, style: group.style, ...group.curves.loss }] : []));

  /** Seconds by phase and bytes by direction, of a whole run. */
  Views.cost = (given) => {
    const seconds = html("div");
    const bytes = html("div");
    const bars = (groups, field, factor) => {
      const names = [...new Set(groups.flatMap((group) => Object.keys(group[field])))];
      const used = names.filter((name) => groups.some((group) => group[field][name] > 0));
      const value = (group, name) => (group[field][name] || 0) * factor;
      if (groups.length > 1) return { parts: used, bars: groups.map((group) => ({ name: group.name, values: used.map((name) => value(group, name)) })) };
      return { parts: ["a run"], bars: used.map((name) => ({ name, values: [value(groups[0], name)] })) };
    };
    const draw = (groups) => {
      const mean = groups.some((group) => group.runs.length > 1) ? ", mean over seeds" : "";
      const small = groups.every((group) => Object.values(group.bytes).every((each) => each < 1e5));
      if (!groups.some((group) => Object.keys(group.seconds).length)) {
        seconds.replaceChildren(sentence("No round is done yet."));
        return;
      }
      Charts.bars(seconds, {
        title: "Seconds per phase", description: `Wall time of a whole run${mean}; evaluate and checkpoint are not part of the method.`,
        unit: "s", digits: 2, ...bars(groups, "seconds", 1),
      });
      Charts.bars(bytes, {
        title: small ? "Kilobytes sent" : "Megabytes sent", description: `All clients and rounds of a run${mean}: up to the server, down to the clients.`,
        unit: small ? "kB" : "MB", digits: small ? 1 : 2, ...bars(groups, "bytes", small ? 1e-3 : 1e-6),
      });
    };
    return ready(block("What it costs", null, html("div", { class: "pair" }, seconds, bytes)), () => draw(given), draw);
  };

  /** Who is left behind: accuracy by client and by class. */
  Views.behind = (given) => {
    const clients = html("div");
    const classes = html("div");
    const told = html("p", { class: "finding" });
    const draw = (run) => {
      const known = run.clients.filter((client) => client.accuracy !== null);
      const tested = (run.confusion.by_class || []).filter((each) => each.tested);
      const worst = lowest(known);
      const hardest = lowest(tested);
      const mean = run.fairness ? run.fairness.mean : null;
      const isPart = run.fairness && known.length < run.fairness.clients;
      const read = `${PREDICTORS[run.predictor]}, clients' local test sets, round ${run.read_in}`;
      told.replaceChildren();
      if (!worst && known.length) told.append(`All clients are at ${percent(known[0].accuracy)}.`);
      if (worst) {
        const below = Charts.fixed(mean - worst.accuracy);
        told.append(html("strong", {}, worst.name), ` is the client furthest behind${isPart ? " of those listed" : ""}: ${percent(worst.accuracy)}, ${below} points below the mean of ${percent(mean)}.`);
      }
      if (worst && run.fairness) {
        const { std, worst_decile: tenth, jain, clients: count, quartiles } = run.fairness;
        told.append(` Over ${Charts.show(count)} clients the standard deviation is ${Charts.fixed(std)} (ddof 1), the worst tenth has ${percent(tenth)}, and Jain's index is ${Charts.fixed(jain, 3)}.`);
        if (quartiles) told.append(` Half of them lie between ${percent(quartiles[0])} and ${percent(quartiles[2])}, the median is ${percent(quartiles[1])}.`);
      }
      if (hardest) told.append(" The hardest class is ", html("strong", {}, hardest.name), ` with ${percent(hardest.accuracy)}.`);
      if (run.clients.length) {
        Charts.bars(clients, {
          title: "Accuracy per client", description: run.read_in === null ? "Not evaluated yet." : `In %, ${read}.${run.clients.length < run.population ? ` ${Charts.show(run.clients.length)} of ${Charts.show(run.population)} clients are listed: of those that took part in it, the lowest.` : ""}`, unit: "%", most: 100, parts: ["accuracy"],
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
          title: "Accuracy per class", description: "In %, over all clients' local test sets together.", unit: "%", most: 100, parts: ["accuracy"],
          bars: run.confusion.by_class.map((each) => ({
            name: each.name, values: [each.tested ? each.accuracy : null], worst: each === hardest,
            note: `${Charts.show(each.tested)} test images`,
          })),
        });
      }
    };
    return ready(block("Who is left behind", null, told, html("div", { class: "pair" }, clients, classes)), () => draw(given), draw);
  };

  /** Return the one with the lowest accuracy; nobody is behind where all are equal. */
  function lowest(list) {
    const ordered = [...list].sort((a, b) => a.accuracy - b.accuracy);
    return ordered.length > 1 && ordered[0].accuracy < ordered[ordered.length - 1].accuracy ? ordered[0] : null;
  }

  /** Which class is taken for which. */
  Views.confusion = (run) => {
    const found = run.confusion;
    const title = "Confusion matrix";
    if (found.missing) return ready(block(title, null, sentence(found.missing)));
    const state = { client: "", percent: true };
    const chart = html("div");
    const list = html("div");
    const draw = () => {
      const one = state.client === "" ? null : found.clients[Number(state.client)];
      const counts = one ? one.counts : found.all;
      const silent = one ? one.unanswered : found.unanswered;
      const any = silent && silent.some((count) => count > 0);
      const who = one ? `Client ${one.name}` : "All clients";
      Charts.matrix(chart, {
        title: `${who}: true class against predicted class`,
        description: `${state.percent ? "Percent of each row" : "Numbers of test images"}; the diagonal is right.${any ? " none: no prototype gave an answer." : ""}`,
        x: "said", y: "true", rows: found.classes, percent: state.percent,
        columns: any ? [...found.classes, "none"] : found.classes,
        counts: any ? counts.map((row, place) => [...row, silent[place]]) : counts,
      });
      list.replaceChildren(...frequent(counts, found.classes));
    };
    const options = [["", "all clients"], ...found.clients.map(({ name }, place) => [String(place), name])];
    return ready(
      block(
        title, null,
        controls(
          choice("Client", options, (value) => { state.client = value; draw(); }),
          choice("Numbers", [["percent", "% of the row"], ["counts", "counts"]], (value) => { state.percent = value === "percent"; draw(); }),
        ),
        found.left_out ? sentence(`Only the ${found.clients.length} clients with the lowest accuracy can be chosen; all are in the sum.`) : null,
        html("div", { class: "beside" }, chart, list),
      ),
      draw,
    );
  };

  /** The most frequent mistakes in words. */
  function frequent(counts, classes) {
    const sums = counts.map((row) => row.reduce((a, b) => a + b, 0));
    const pairs = counts.flatMap((row, truth) => row.map((count, said) => ({ truth, said, count })));
    const wrong = pairs.filter(({ truth, said, count }) => truth !== said && count > 0).sort((a, b) => b.count - a.count);
    if (!wrong.length) return [html("p", { class: "note" }, "No image was predicted as another class.")];
    const item = ({ truth, said, count }) =>
      html(
        "li", {}, html("strong", {}, classes[truth]), " predicted as ", html("strong", {}, classes[said]),
        html("small", {}, `${Charts.show(count)} of ${Charts.show(sums[truth])} (${percent((100 * count) / sums[truth])})`),
      );
    return [html("p", {}, html("strong", {}, "Most frequent mistakes")), html("ol", {}, wrong.slice(0, 6).map(item))];
  }

  /** Who holds what. */
  Views.partition = (run) => {
    const held = run.partition;
    if (held.missing) return ready(block("Who holds what", null, sentence(held.missing)));
    const chart = html("div");
    const note = held.left_out ? sentence(`${Charts.show(held.clients.length)} of ${Charts.show(held.clients.length + held.left_out)} clients are shown, evenly drawn by name.`) : null;
    return ready(block("Who holds what", null, note, chart), () => {
      Charts.bubbles(chart, {
        title: "Training images per client and class", description: `${run.setting}. The area of a bubble is the number of images.`,
        x: "class", y: "client", unit: "training images", rows: held.clients.map((client) => client.name),
        columns: held.classes, values: held.clients.map((client) => client.train),
      });
    });
  };

  /** Updates that were rejected, clients that did not answer. */
  Views.absences = (run) => {
    const { rows, left_out: leftOut } = run.absences;
    const title = "Rejected and missing clients";
    if (!rows.length) return ready(block(title, null, sentence("None: every chosen client answered in every round, and nothing was rejected.")));
    const table = Charts.numbers({
      caption: "Who was rejected or did not answer",
      columns: ["client", "what happened", "why", "times", "rounds"],
      rows: rows.map((row) => [row.client, row.what, row.why || "-", row.times, row.first === row.last ? row.first : `${row.first} to ${row.last}`]),
    });
    return ready(block(title, null, table, leftOut ? sentence(`${leftOut} more are left out.`) : null));
  };

  /** Every setting, the versions, and how to get the run again. */
  Views.settings = (run) => {
    const { settings } = run;
    const versions = Object.entries(settings.versions).map(([name, value]) => `${name} ${value}`).join(", ");
    return ready(
      block(
        "Run it again", null,
        settings.command ? copy(settings.command, settings.how) : null,
        copy(settings.file_command, settings.command ? "Or from the run's own file, which holds every setting:" : "From the run's own file, which holds every setting:"),
        html("details", { class: "numbers" }, html("summary", {}, "All settings"), html("pre", { tabindex: 0, "aria-label": "All settings" }, html("code", {}, settings.toml))),
        versions ? sentence(`Made with ${versions}${settings.threads ? `; ${settings.threads} thread${settings.threads > 1 ? "s" : ""}` : ""}.`) : null,
      ),
    );
  };
})();
