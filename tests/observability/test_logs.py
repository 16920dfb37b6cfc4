import json
import logging

from observability.logs import configure_logging, split_fields


def test_fields_of_a_message_are_split_off():
    assert split_fields("request_done request_id=ab pages=3") == (
        "request_done",
        {"request_id": "ab", "pages": "3"},
    )
    assert split_fields("a == b is true") == ("a == b is true", {})


def test_json_lines_carry_fields_and_exceptions(capsys):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging("info", "json")
        log = logging.getLogger("test")
        log.debug("not_shown")
        log.info("transfer_done pages=%d", 3)
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("transfer_failed")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)

    done, failed = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert (done["event"], done["pages"], done["level"]) == ("transfer_done", "3", "info")
    assert "ValueError: why" in failed["exception"]
