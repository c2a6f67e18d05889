"""Draw docs/images/architecture.svg: the packages in layers, and the way of a round through them.

python scripts/draw_architecture.py
"""

from html import escape
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "architecture.svg"
WIDTH, HEIGHT = 1275, 948
SHIFT = 35
"""Of the right half, beside the widest names of packages."""

# From top to bottom: a package imports only packages below it.
LAYERS = (
    ("use", "cli", "commands, arguments, progress"),
    ("use", "api, flower_app, worker", "run and resume; Flower's apps"),
    ("use", "watch", "the live page"),
    ("use", "tracking", "TensorBoard, MLflow, your own"),
    ("use", "report", "tables, figures, HTML page, model card"),
    ("use", "deployment", "predict, export, join, calibration"),
    ("use", "convergence", "the paper's bounds, beside a run"),
    ("use", "studies", "compare, tune, the paper's tables"),
    ("run", "network", "server, client, Flower"),
    ("run", "runs", "run loop, checkpoint, run directory"),
    ("run", "engines", "where clients train; trainers"),
    ("run", "rounds", "loop, processors, guard, rules"),
    ("base", "methods", "base class, one short file each"),
    ("base", "data", "samples, split among clients, fetch"),
    ("base", "encoders", "frozen encoders, feature cache"),
    ("base", "models", "networks as pure functions"),
    ("base", "messages, json_files", "Broadcast, Update; files by declaration"),
    ("base", "privacy", "differential privacy: noise, accounting"),
    ("base", "gaussian", "closed-form classifiers from sums"),
    ("base", "prototypes", "clustering, pool, contrastive loss"),
    ("base", "experiment", "every setting, checked; TOML"),
    ("base", "secure_aggregation", "the protocol, both parties of it"),
)
# Fill and border of each kind of box. The picture has its own white ground, for dark pages.
COLORS = {
    "use": ("#e8f1fb", "#3b78b8"),
    "run": ("#fdeedd", "#c9741b"),
    "base": ("#e6f4ea", "#2f8550"),
    "plain": ("#ffffff", "#666666"),
}


def text(x: float, y: float, words: str, *, size: int = 14, weight: str = "normal") -> str:
    """Return one line of text, its left end at x."""
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, *lines: str) -> str:
    """Return a box with a bold first line and plain further lines."""
    fill, border = COLORS[kind]
    parts = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" '
        f'stroke="{border}" stroke-width="1.5"/>'
    ]
    for number, line in enumerate(lines):
        size, weight = (15, "bold") if number == 0 else (13, "normal")
        parts.append(text(x + 10, y + 22 + 18 * number, line, size=size, weight=weight))
    return "".join(parts)


def arrow(*points: tuple[float, float]) -> str:
    """Return a line through the points, with a head at the last."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="#333" stroke-width="2" '
        'marker-end="url(#head)"/>'
    )


def draw_layers() -> list[str]:
    """Return the left half: the packages, one row each."""
    parts = [text(20, 38, "Packages: each imports only those below", size=18, weight="bold")]
    for number, (kind, name, about) in enumerate(LAYERS):
        fill, border = COLORS[kind]
        y = 56 + 39 * number
        parts += [
            f'<rect x="20" y="{y}" width="475" height="33" rx="5" fill="{fill}" '
            f'stroke="{border}" stroke-width="1.2"/>',
            text(30, y + 22, name, size=14, weight="bold"),
            text(227, y + 22, about, size=13),
        ]
    below = "For all of them: errors, rng, files, tensors, images, user_classes, waiting_bar"
    return [*parts, text(20, 56 + 39 * len(LAYERS) + 18, below, size=12)]


def draw_engines() -> list[str]:
    """Return the three engines, and what a client does in each of them."""
    client = (
        "each client, with the method's hooks",
        "prepare; per step: at_step, loss, adjust;",
        "then finish and summarize  →  Update",
        "trained by engines/ loop, stacked or factored:",
        "same result, chosen by speed",
    )
    network = (
        "over a network",
        "network/server/engine.py  →  transport.py  →",
        "flower/  →  client/: one message per client,",
        "which runs the in-process engine for itself",
    )
    processes = ("in several processes (--workers, torchrun)", "engines/distributed.py")
    return [
        box(790, 56, 430, 434, "plain", "2  Train: the engine, one of three"),
        box(805, 92, 400, 54, "run", "in this process", "engines/in_process.py"),
        box(805, 156, 400, 54, "run", *processes),
        box(805, 220, 400, 90, "run", *network),
        box(805, 368, 400, 110, "base", *client),
        arrow((1005, 310), (1005, 362)),
    ]


def draw_round() -> list[str]:
    """Return the right half: the way of a round."""
    broadcast = ("1  Broadcast", "rounds/loop.py: the", "shared parameters and the pool")
    evaluation = ("6  Evaluation", "rounds/evaluation.py:", "accuracies on test images")
    record = (
        "7  Record and checkpoint",
        "runs/run_loop.py: rounds.jsonl,",
        "checkpoint/, observers",
    )
    guard = ("4  UpdateValidator", "rounds/validation.py rejects bad updates, with a reason")
    aggregation = ("5  Aggregation", "rounds/aggregation/: a rule; then the method's reduce")
    processors = ("3  Processors", "rounds/processors/: out of a client, and in at the server")
    hidden = (
        "Secure aggregation, and a privacy budget",
        "--secure-aggregation: secure_aggregation/ opens one Total in place of updates (total_collector.py)",
        "--privacy.epsilon: rounds/ adds noise, privacy/ accounts for it and for what is left",
    )
    return [
        text(500, 38, "A round", size=18, weight="bold"),
        box(500, 56, 245, 76, "run", *broadcast),
        arrow((745, 94), (784, 94)),
        *draw_engines(),
        arrow((1005, 490), (1005, 532)),
        text(1018, 516, "updates, by client name", size=13),
        box(805, 538, 400, 54, "run", *processors),
        arrow((1005, 592), (1005, 624)),
        box(805, 630, 400, 54, "run", *guard),
        arrow((1005, 684), (1005, 716)),
        box(805, 722, 400, 54, "run", *aggregation),
        arrow((805, 749), (751, 749)),
        box(500, 711, 245, 76, "run", *evaluation),
        arrow((622, 711), (622, 644)),
        box(500, 562, 245, 76, "run", *record),
        arrow((622, 562), (622, 138)),
        text(634, 350, "next round", weight="bold"),
        box(500, 826, 720, 76, "plain", *hidden),
    ]


def main() -> None:
    """Write the picture."""
    head = (
        '<marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M 0 0 L 10 5 L 0 10 z" fill="#333"/></marker>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" fill="#1a1a1a">',
        "<title>The packages of mpfedcl in layers, and the way of a round through them</title>",
        f"<defs>{head}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>',
        *draw_layers(),
        f'<g transform="translate({SHIFT}, 0)">',
        *draw_round(),
        "</g>",
        "</svg>",
    ]
    PICTURE.write_text("\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
