"""Log lines as events: a constant message and fields, one line each, JSON in files and key=value on a terminal.

    log = logs.get(__name__)
    log.info("reservation expired", reservation_id=reservation.id, attempt=2)

`logging.getLogger` works too, with `extra={"fields": {...}}`. The running request's id and trace id are added by
themselves. Fields that may hold what a user wrote (PRIVATE) appear at DEBUG only.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from typing import Any, TextIO

from headrace.errors import ConfigError
from headrace.observe.context import request_id_var, traceparent_var

PRIVATE = frozenset({"text", "prompt", "messages", "content", "token_ids", "prompt_token_ids", "output_token_ids"})
"""Field names whose values are replaced by `(hidden)` above DEBUG."""
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class Log:
    """A named source of events. Keyword arguments become fields."""

    def __init__(self, inner: logging.Logger):
        self._inner = inner

    def debug(self, event: str, **fields: Any) -> None:
        """For whoever looks for a fault in this process."""
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """What an operator wants in the record of a good day."""
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Something was lost or chosen differently than asked; the service goes on."""
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, *, error: BaseException | None = None, **fields: Any) -> None:
        """Something that must not happen; `error` brings its traceback."""
        self._emit(logging.ERROR, event, fields, error)

    def _emit(self, level: int, event: str, fields: dict[str, Any], error: BaseException | None = None) -> None:
        if self._inner.isEnabledFor(level):
            self._inner.log(level, "%s", event, extra={"fields": fields}, exc_info=error)


def get(name: str) -> Log:
    """The log of a module: `log = logs.get(__name__)`."""
    return Log(logging.getLogger(name))


def setup(service: str, epoch: str, level: str, stream: TextIO | None = None) -> None:
    """Sends this process's lines to `stream` (stderr). Raises ConfigError for an unknown level."""
    if level.upper() not in _LEVELS:
        raise ConfigError(
            f"telemetry.log_level = {level!r}, not one of {', '.join(_LEVELS)}", field="telemetry.log_level"
        )
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter({"service": service, "epoch": epoch}, as_json=not stream.isatty()))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("asyncio", "grpc", "opentelemetry"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLevelName(level.upper())))


class _Formatter(logging.Formatter):
    def __init__(self, common: dict[str, str], as_json: bool):
        super().__init__()
        self._common = common
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        line = self._line(record)
        if self._as_json:
            return json.dumps(line, default=str, ensure_ascii=False)
        head = f"{line.pop('time')} {line.pop('level'):7} {line.pop('event')}"
        trace = line.pop("traceback", "")
        pairs = " ".join(f"{key}={_word(value)}" for key, value in line.items())
        return "\n".join(part for part in (f"{head} {pairs}", trace) if part)

    def _line(self, record: logging.LogRecord) -> dict[str, Any]:
        line: dict[str, Any] = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}",
            "level": record.levelname,
            "event": record.getMessage(),
            "logger": record.name,
            **self._common,
        }
        if request_id := request_id_var.get():
            line["request_id"] = request_id
        if traceparent := traceparent_var.get():
            line["trace_id"] = traceparent[3:35]
        for key, value in getattr(record, "fields", {}).items():
            line[key] = "(hidden)" if key in PRIVATE and record.levelno > logging.DEBUG else value
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1])).rstrip()
        return line


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return json.dumps(text) if not text or any(mark in text for mark in ' "=\n') else text
