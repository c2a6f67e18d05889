"use strict";
/* What only a run that may be going on shows: where it stands, its clients by round, who answered. */
(() => {
  const { html } = Charts;
  const { block, choice, controls, ready, sentence } = Parts;

  const size = (bytes) => (bytes < 1e6 ? `${Charts.fixed(bytes / 1e3)} kB` : `${Charts.fixed(bytes / 1e6)} MB`);

  /** Where a run stands. */
  Views.latest = (given) => {
    const facts = html("dl", { class: "facts" });
    const absent = html("div");
    const draw = ({ run, latest, group }) => {
      const total = latest ? latest.asked : 0;
      const read = run.fairness ? run.fairness.clients : 0;
      const judged = read ? `${Charts.fixed(run.fairness.mean)} %` : "-";
      const seconds = Object.values(group.seconds).reduce((sum, each) => sum + each, 0);
      const bytes = Object.values(group.bytes).reduce((sum, each) => sum + each, 0);
      const list = [
        ["Round", `${run.rounds}`, `of ${run.planned}`],
        ["Accuracy", judged, run.read_in === null ? "not evaluated yet" : `mean over ${read < run.population ? `${Charts.show(read)} of ${Charts.show(run.population)} ` : ""}clients, round ${run.read_in}`],
        ["Loss", latest ? Charts.show(latest.loss, 4) : "-", "training"],
        ["Answered", latest ? `${latest.answered}` : "-", latest ? `of ${total} in round ${latest.round}` : ""],
        ["Last round took", latest ? `${Charts.show(latest.seconds, 2)} s` : "-", `${Charts.show(seconds, 0)} s in all`],
        ["Sent in all", size(bytes), latest ? `${size(latest.bytes.up || 0)} up in the last round` : ""],
      ];
      facts.replaceChildren(...list.map(([name, value, note]) => html("div", {}, html("dt", {}, name), html("dd", {}, value, " ", html("small", {}, note)))));
      absent.replaceChildren(...(latest ? absences(latest) : []));
    };
    return ready(block("Where it stands", null, facts, absent), () => draw(given), draw);
  };

  /** Who is missing from the last round, and why, in words. */
  function absences({ round, absent }) {
    if (!absent.length) return [];
    const said = { rejected: "was rejected", "not let in": "was not let in" };
    const item = ([name, what, why]) => html("li", {}, html("strong", {}, name), ` ${said[what] || what}${why ? `: ${why}` : ""}`);
    return [
      html(
        "ul", { class: "absent", "aria-label": `Not accepted in round ${round}` },
        absent.map(item),
      ),
    ];
  }

  /** What `mpfedcl predict --log` has noted last: how many new images were far from the pool. */
  Views.drift = (given) => {
    const list = html("ul", { class: "absent", "aria-label": "Logged predictions" });
    const draw = (lines) => list.replaceChildren(...lines.map((line) => html(
      "li", {},
      html("strong", {}, line.drift ? "Drift" : "No drift"),
      ` ${line.time.slice(0, 16).replace("T", " ")}${line.client === null ? "" : `, ${line.client}`}: ${line.flagged} of ${line.images} were far from the pool; by chance at most ${line.at_most} would be`,
    )));
    return ready(block("Drift", "New images, as mpfedcl predict --log has counted them; the newest first.", list), () => draw(given), draw);
  };

  /** Accuracy or loss of each client by round. */
  Views.clients = (given) => {
    let clients = given;
    const chart = html("div");
    const note = html("div");
    const state = { measure: "accuracy" };
    const draw = () => {
      const isLoss = state.measure === "loss";
      const lines = clients[state.measure] || [];
      const total = clients.left_out ? clients.names.length + clients.left_out : 0;
      const some = `${clients.names.length} of ${Charts.show(total)} clients are shown, evenly drawn by name.`;
      const many = `${Charts.show(total)} clients are too many for a line each: half of those that were read lie between the quartiles.`;
      note.replaceChildren(total ? sentence(clients.names.length ? some : many) : "");
      if (!lines.length) {
        chart.replaceChildren(sentence(isLoss ? "No client's loss is recorded yet." : "No client has been evaluated yet."));
        return;
      }
      Charts.lines(chart, {
        title: isLoss ? "Training loss per client" : "Accuracy per client",
        description: isLoss ? "Of the clients whose updates were accepted." : "In %, on each client's local test set, by the predictor the method is judged by.",
        x: "round", y: isLoss ? "loss" : "accuracy (%)", digits: isLoss ? 3 : 1, low: 0, high: isLoss ? undefined : 100, lines,
      });
    };
    const measures = choice("Show", [["accuracy", "accuracy"], ["loss", "loss"]], (value) => { state.measure = value; draw(); });
    return ready(block("Client by client", null, controls(measures), note, chart), draw, (next) => { clients = next; draw(); });
  };

  /** How many clients answered in each round. */
  Views.attendance = (given) => {
    const chart = html("div");
    const draw = (attendance) => {
      const { rounds, answered, missing, rejected } = attendance;
      if (!rounds.length) {
        chart.replaceChildren(sentence("No round is done yet."));
        return;
      }
      if (![...missing, ...rejected].some((each) => each > 0)) {
        chart.replaceChildren(sentence("Every client that was asked answered in every round, and nothing was rejected."));
        return;
      }
      const line = (name, mean) => ({ name, x: rounds, mean });
      Charts.lines(chart, {
        title: "Clients per round", description: "Answered and accepted, rejected by the guard, or asked without an answer.",
        x: "round", y: "clients", digits: 0, low: 0, lines: [line("answered", answered), line("rejected", rejected), line("did not answer", missing)],
      });
    };
    return ready(block("Who answered", null, chart), () => draw(given), draw);
  };
})();
