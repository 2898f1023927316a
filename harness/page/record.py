"""Run records: checked against the JSON Schema beside this file, and written whole or not at all."""

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from harness import RunError

SCHEMA_FILE = Path(__file__).with_name("record.schema.json")
"""The JSON schema of a record."""
Record = dict[str, Any]
"""A record of a run, as the page gives it."""
_SHOWN = 5


@cache
def validator() -> Draft202012Validator:
    """The validator of run records."""
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def check(record: Record) -> Record:
    """Check ``record`` and return it.  RunError with the first places where it breaks the schema or disagrees."""
    faults = [f"{error.json_path}: {error.message}" for error in validator().iter_errors(record)]
    faults = faults or _contradictions(record)
    if faults:
        more = f" (and {len(faults) - _SHOWN} more)" if len(faults) > _SHOWN else ""
        raise RunError(
            "the page's record does not follow harness/page/record.schema.json: " + "; ".join(faults[:_SHOWN]) + more,
            "BadRecord",
        )
    return record


def write(record: Record, path: Path) -> None:
    """Write ``record`` to ``path`` as JSON: readers see the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(part).chmod(0o644)
        Path(part).replace(path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def _contradictions(record: Record) -> list[str]:
    """The places where parts of ``record`` do not agree, which a schema cannot say."""
    tokens, ids = record["tokens"], record["token_ids"]
    faults = []
    if [token["id"] for token in tokens] != ids:
        faults.append(f"$.tokens: their ids are not $.token_ids ({len(tokens)} tokens, {len(ids)} ids)")
    if [token["index"] for token in tokens] != list(range(len(tokens))):
        faults.append("$.tokens: the indices do not count from 0")
    # Rounded on the page: the parts may exceed the whole by a little, never by a millisecond a token.  A step may be
    # encoded while an earlier token is waited for, so encoding has to fit the whole run only.
    faults += [
        f"$.tokens[{token['index']}]: wait_ms exceeds ms" for token in tokens if token["wait_ms"] > token["ms"] + 1
    ]
    if sum(token["encode_ms"] + token["wait_ms"] - token["ms"] - 1 for token in tokens) > 0:
        faults.append("$.tokens: encode_ms and wait_ms exceed ms in all")
    for asked, missing in (
        ("digest", [token for token in tokens if "digest" not in token]),
        ("gpu_time", [token for token in tokens if token["gpu_ms"] is None]),
    ):
        if record["scenario"].get(asked) and missing:
            faults.append(f"$.tokens[{missing[0]['index']}]: the scenario asks for {asked}, there is none")
    return faults + _kernel_contradictions(record)


def _kernel_contradictions(record: Record) -> list[str]:
    """The faults of the table of GPU time per kernel: missing though asked for, or not complete."""
    kernels = record.get("kernels")
    if kernels is None:
        missing = record["scenario"].get("kernel_times") and record["finish_reason"] != "cancelled"
        return ["$.kernels: the scenario asks for kernel_times, there is none"] if missing else []
    faults = []
    launches = sum(row["launches"] for row in kernels["rows"])
    if launches != kernels["launches_per_token"]:
        faults.append(f"$.kernels.rows: they have {launches} launches of {kernels['launches_per_token']}")
    shares = [row["share"] for row in kernels["rows"] if row["share"] is not None]
    if shares and abs(sum(shares) - 1) > 1e-6:
        faults.append(f"$.kernels.rows: the shares come to {sum(shares)}, not 1")
    return faults
