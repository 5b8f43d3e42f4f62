"""What came of `gpu_check.sh`, as JSON, and as an entry of a logbook: `gpu_check_summary.py ROWS OUT [LOGBOOK]`.

Needs nothing but Python. A row is a check, its verdict, its seconds and the reason, between tabs.
"""

import datetime
import json
import platform
import sys
from pathlib import Path

FORMAT = "harness.gpu-check/1"


def summary(rows: str) -> dict[str, object]:
    """The rows as a value; times in seconds."""
    names = ("check", "verdict", "seconds", "reason")
    checks = [dict(zip(names, row.split("\t"), strict=True)) for row in rows.splitlines()]
    return {
        "format": FORMAT,
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "checks": [{**check, "seconds": int(check["seconds"])} for check in checks],
    }


def entry(found: dict[str, object]) -> str:
    """A logbook's entry: what ran, and what could not be run and why."""
    checks: list[dict[str, object]] = found["checks"]  # type: ignore[assignment]
    ran = [f"- {one['check']}: {one['verdict']} ({one['reason']})" for one in checks if one["verdict"] != "not run"]
    reasons: dict[str, list[str]] = {}
    for one in checks:
        if one["verdict"] == "not run":
            reasons.setdefault(str(one["reason"]), []).append(str(one["check"]))
    left = [f"- not run: {', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return "\n".join([f"\n## {str(found['at'])[:10]} measured: GPU check", "", *ran, *left, ""])


def main() -> None:
    """The program."""
    rows, out, *logbook = map(Path, sys.argv[1:])
    found = summary(rows.read_text())
    out.write_text(json.dumps(found, indent=1) + "\n")
    for path in logbook:
        with path.open("a") as stream:
            stream.write(entry(found))


if __name__ == "__main__":
    main()
