"""Logs of a federation's processes: JSON lines or text with time and level, and their rotation."""

import contextlib
import json
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mpfedcl.core.progress import stderr_console

JSON_VARIABLE = "MPFEDCL_LOG_JSON"
"""Environment variable by which a command tells its processes to log JSON lines."""
MOST_BYTES, _KEPT = 10 * 2**20, 3
"""Size of a log at which it is rotated, and how many old ones are kept."""
_TEXT = "%(asctime)s %(levelname)s %(message)s"

logger = logging.getLogger("mpfedcl")


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return time, level, logger, message and, after an error, its traceback."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _ConsoleHandler(logging.Handler):
    """Shows messages to the operator at a terminal, without time and level."""

    def emit(self, record: logging.LogRecord) -> None:
        stderr_console().print(record.getMessage(), markup=False)


def log_to_operator(*, as_json: bool) -> None:
    """Send this process's messages to standard error, for the operator or as JSON lines."""
    if as_json:
        os.environ[JSON_VARIABLE] = "1"
    handler = logging.StreamHandler(sys.stderr) if as_json else _ConsoleHandler()
    _use(handler, JsonFormatter())


def log_to_file() -> None:
    """Send this process's messages to standard error, which is its log file."""
    is_json = bool(os.environ.get(JSON_VARIABLE))
    _use(logging.StreamHandler(sys.stderr), JsonFormatter() if is_json else _text_formatter())


def configure_logs(config: dict[str, Any]) -> dict[str, Any]:
    """Return uvicorn's configuration with our format, and give it to Flower's handlers."""
    # It repeats every few seconds.
    logging.getLogger("flwr").addFilter(lambda record: "ListNodes" not in record.getMessage())
    if os.environ.get(JSON_VARIABLE):
        for name in config["formatters"]:
            config["formatters"][name] = {"()": JsonFormatter}
        plain = logging.StreamHandler(sys.stdout)
        plain.setFormatter(JsonFormatter())
        flower = logging.getLogger("flwr")
        plain.setLevel(max((each.level for each in flower.handlers), default=logging.INFO))
        flower.handlers[:] = [plain]
    log_to_file()
    return config


def rotate_log(path: Path, most: int = MOST_BYTES) -> None:
    """Copy a log that has become too large, and empty it.

    Its writers append, so they go on at the new end; lines written during the copy may be lost.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size < most:
            return
        for number in range(_KEPT, 1, -1):
            older = path.with_name(f"{path.name}.{number - 1}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number}"))
        newest = path.with_name(f"{path.name}.1")
        handle = os.open(newest, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with path.open("rb") as source, os.fdopen(handle, "wb") as copy:
            while block := source.read(2**20):
                copy.write(block)
        os.truncate(path, 0)


def _use(handler: logging.Handler, formatter: logging.Formatter) -> None:
    handler.setFormatter(formatter)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)


def _text_formatter() -> logging.Formatter:
    return logging.Formatter(_TEXT)
