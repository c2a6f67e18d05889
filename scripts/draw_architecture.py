"""Draw docs/images/architecture.svg: the packages in layers, and the path of a round through them.

python scripts/draw_architecture.py
"""

from html import escape
from pathlib import Path

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "architecture.svg"
WIDTH, HEIGHT = 1220, 925
SHIFT = -25
"""Moves the right half next to the boxes of the packages."""
ROW = 50

# From top to bottom, as import-linter has them: a package imports only packages below it.
LAYERS = (
    ("use", "cli, sklearn", "commands; scikit-learn's estimator"),
    ("use", "api, flower_app", "run and resume; a federation's run"),
    ("use", "report", "tables, figures, live page, trackers"),
    ("use", "inference", "predict, export, join, calibration"),
    ("use", "studies", "compare and tune"),
    ("run", "network", "server, client, Flower"),
    ("run", "runs", "run loop, checkpoint, run directory"),
    ("run", "engines", "where clients train; trainers"),
    ("run", "rounds", "round loop, validation, aggregation"),
    ("base", "privacy", "DP releases, secure aggregation"),
    ("base", "methods", "interface, messages, one file each"),
    ("base", "data", "samples, partitions, downloads"),
    ("base", "models", "networks, frozen encoders"),
    ("base", "gaussian", "closed-form classifiers, DP noise"),
    ("base", "prototypes", "clustering, pool, contrastive loss"),
    ("base", "experiment", "all settings, names, TOML"),
    ("base", "core", "errors, files, rng, tensors, plugins"),
)
# Fill and border of each kind of box. The figure has a white background, for dark pages.
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
        y = 56 + ROW * number
        parts += [
            f'<rect x="20" y="{y}" width="415" height="{ROW - 8}" rx="5" fill="{fill}" '
            f'stroke="{border}" stroke-width="1.2"/>',
            text(30, y + 26, name, size=14, weight="bold"),
            text(165, y + 26, about, size=14),
        ]
    return parts


def draw_engines() -> list[str]:
    """Return the three engines and the work of a client in each of them."""
    client = (
        "each client, with the method's hooks",
        "prepare, begin; per step: loss, adjust, after_step;",
        "then finish and summarize  →  Update",
        "by a trainer of engines/trainers/: loop, stacked,",
        "direct or factored; they differ by rounding only",
    )
    network = (
        "over a network",
        "network/server/engine.py  →  transport.py  →",
        "flower/  →  client/: one message per client,",
        "which trains with the in-process engine",
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
    """Return the right half: the path of a round."""
    broadcast = ("1  Broadcast", "rounds/loop.py: shared", "parameters, prototype pool")
    evaluation = ("6  Evaluation", "rounds/evaluation.py:", "predictors on both test sets")
    record = (
        "7  Record and checkpoint",
        "runs/run_loop.py: rounds.jsonl,",
        "checkpoint/, callbacks",
    )
    processors = ("3  Processors", "rounds/processors/: clip, private statistics, compress")
    validation = ("4  Update validation", "rounds/validation.py rejects bad updates with a reason")
    aggregation = ("5  Aggregation", "rounds/collector.py, rounds/aggregation/; method.reduce")
    hidden = (
        "Secure aggregation and differential privacy",
        "--secure-aggregation: the engine yields one Total instead of updates (TotalCollector)",
        "--privacy.epsilon: privacy/private_rounds.py adds noise, privacy/ledger.py records the "
        "spent budget",
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
        box(805, 630, 400, 54, "run", *validation),
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
    """Write the figure."""
    head = (
        '<marker id="head" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M 0 0 L 10 5 L 0 10 z" fill="#333"/></marker>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" fill="#1a1a1a">',
        "<title>The packages of mpfedcl in layers, and the path of a round through them</title>",
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
