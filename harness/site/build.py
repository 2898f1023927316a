"""The builder of ``dist/``: the page, Pyodide, the wheels with their lock file, the demo model, and a manifest.

    dist/
      index.html, …            web/, copied
      run_options.js           the table of run options, of which the form is made
      stepwell-attach.js       the pool under another runtime, for pages without Pyodide
      vendor/pyodide/          Pyodide core and pyodide-lock.json (only the wheels below)
      vendor/uplot/, vendor/tokenizers/
      vendor/wheels/           stepwell, jinja2, markupsafe, micropip
      vendor/onnxruntime-web/  the runtime that attach is shown and measured with
      models/                  the demo model, when there is one
      models/onnx/             growing K and V for onnxruntime-web (onnx_models.py)
      manifest.json            versions, the wheel, the models, size and sha256 of every file

Nothing is rebuilt or fetched twice: downloads and wheels are kept under ``.stepwell/`` by version or content.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import CACHE, DIST, ROOT, SetupError
from harness.site import models, npm, wheels
from harness.site.pins import MODELS, NPM, PYODIDE_VERSION, WHEELS
from harness.site.process import Report
from stepwell.attach.bundle import script
from stepwell.page.run_options import RUN_OPTIONS

# files of the built site
MANIFEST = "manifest.json"
ATTACH = "stepwell-attach.js"
OPTIONS = "run_options.js"
LOCK = "vendor/pyodide/pyodide-lock.json"


@dataclass(frozen=True, slots=True)
class Site:
    """A built site: its folder and its manifest."""

    root: Path
    manifest: dict[str, Any]

    def model(self, name: str) -> dict[str, Any] | None:
        """The manifest's entry of the bundled model with the id ``name``, or None."""
        return next((entry for entry in self.manifest["models"] if entry["id"] == name), None)


def build_site(
    dist: Path = DIST,
    *,
    web: Path = ROOT / "web",
    cache: Path = CACHE,
    with_model: bool = True,
    report: Report = lambda _: None,
) -> Site:
    """Bring ``dist`` up to date from ``web`` and ``cache``.  ``report`` is told each step that may take long.

    The demo model is part of it if ``with_model``.  A model that cannot be fetched is reported and left out: the page
    also takes a local file.
    """
    if not web.is_dir():
        raise SetupError(f"{web} does not exist: run this in a checkout of the project.")
    dist.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    with exclusive(cache / "site.lock"):
        return _build(dist, web, cache, with_model, report)


def load_site(root: Path) -> Site:
    """The site that an earlier build left in ``root``; SetupError when there is none or it is not whole.

    Only sizes are compared with the manifest: that finds a copy that broke off, at no cost.
    """
    try:
        manifest = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        wanted = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SetupError(
            f"{root} is no built site ({MANIFEST}: {error}). `python -m harness site` builds one."
        ) from error
    wrong = [name for name, size in wanted.items() if not _has_size(root / name, size)]
    if wrong:
        raise SetupError(
            f"{root}: {len(wrong)} of {len(wanted)} files are missing or cut short ({', '.join(wrong[:3])}). "
            "Build or copy the site again."
        )
    return Site(root, manifest)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _build(dist: Path, web: Path, cache: Path, with_model: bool, report: Report) -> Site:
    kept = _copy_tree(web, dist)
    kept |= {_add_text(dist, ATTACH, script()), _add_text(dist, OPTIONS, options_script())}
    kept |= _add_npm(dist, cache / "npm", report)
    ours, wheel_files = _add_wheels(dist, cache, report)
    kept |= wheel_files
    kept |= _add_onnx_models(dist)
    entries = _add_models(dist, cache / "models", report) if with_model else []
    kept.update(entry["file"] for entry in entries)
    _remove_strangers(dist, kept)
    return Site(dist, _write_manifest(dist, cache, kept, ours, entries))


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold ``path`` against other builders of the same checkout (test runs, a server)."""
    with path.open("a") as file:
        try:
            import fcntl
        except ImportError:  # Windows: two builds at once are the user's to avoid
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _copy_tree(source: Path, dist: Path) -> set[str]:
    kept = set()
    for path in sorted(p for p in source.rglob("*") if p.is_file() and not p.name.startswith(".")):
        name = path.relative_to(source).as_posix()
        _copy(path, dist / name)
        kept.add(name)
    return kept


def _copy(source: Path, target: Path) -> None:
    before, after = source.stat(), target.stat() if target.exists() else None
    if after and (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    shutil.copy2(source, part)
    part.replace(target)


def options_script() -> str:
    """The module that tells the page which run options there are."""
    rows = [option.describe() for option in RUN_OPTIONS.values()]
    return f"export const RUN_OPTIONS = {json.dumps(rows, indent=1)};\n"


def _add_text(dist: Path, name: str, text: str) -> str:
    part = dist / (name + ".part")
    part.write_text(text, encoding="utf-8")
    _replace_if_changed(part, dist / name)
    return name


def _add_npm(dist: Path, cache: Path, report: Report) -> set[str]:
    kept = set()
    for pin in NPM:
        stamp = f"{pin.name}@{pin.version} {pin.integrity}"
        marker = cache / f"{pin.name.lstrip('@').replace('/', '-')}-{pin.version}"
        if not (marker / "stamp").exists() or (marker / "stamp").read_text(encoding="utf-8") != stamp:
            archive = npm.fetch(pin, cache, report)
            npm.extract(archive, {name: marker / name for name in [*pin.files, *_UPSTREAM.get(pin.name, ())]})
            (marker / "stamp").write_text(stamp, encoding="utf-8")
        for name, target in pin.files.items():
            _copy(marker / name, dist / target)
            kept.add(target)
    return kept


_UPSTREAM = {"pyodide": ("pyodide-lock.json",)}  # unpacked for the builder, not served


def _add_wheels(dist: Path, cache: Path, report: Report) -> tuple[str, set[str]]:
    """The site path of our wheel, and the paths of all wheels and the lock file."""
    ours = wheels.build(ROOT, cache / "build", report)
    found = [ours, *(wheels.fetch(pin, cache / "wheels", report) for pin in WHEELS)]
    for wheel in found:
        _copy(wheel, dist / "vendor/wheels" / wheel.name)
    upstream = cache / "npm" / f"pyodide-{PYODIDE_VERSION}" / "pyodide-lock.json"
    part = dist / (LOCK + ".part")
    wheels.write_lock(upstream, found, "../wheels", part)
    _replace_if_changed(part, dist / LOCK)
    return f"vendor/wheels/{ours.name}", {LOCK, *(f"vendor/wheels/{w.name}" for w in found)}


def _replace_if_changed(part: Path, target: Path) -> None:
    if target.exists() and target.read_bytes() == part.read_bytes():
        part.unlink()
    else:
        part.replace(target)


def _add_models(dist: Path, cache: Path, report: Report) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for pin in MODELS:
        try:
            source = models.fetch(pin, cache, report)
        except SetupError as error:
            report(f"going on without {pin.name}: {error}")
            continue
        name = f"models/{pin.file}"
        models.place(source, dist / name)
        size = source.stat().st_size
        entries.append(
            {"id": pin.id, "name": pin.name, "file": name, "bytes": size, "sha256": pin.sha256, "licence": pin.licence}
        )
    return entries


def _add_onnx_models(dist: Path) -> set[str]:
    from harness.site import onnx_models  # half of what importing this module would take

    kept = set()
    for name, data in onnx_models.files().items():
        path = f"{onnx_models.FOLDER}/{name}"
        part = dist / (path + ".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        _replace_if_changed(part, dist / path)
        kept.add(path)
    return kept


def _remove_strangers(dist: Path, kept: set[str]) -> None:
    """Delete the files of earlier builds, so that the site has those of the manifest alone."""
    for folder, _, names in os.walk(dist, topdown=False):
        for name in names:
            path = Path(folder) / name
            if path.relative_to(dist).as_posix() not in {*kept, MANIFEST}:
                path.unlink()
        if Path(folder) != dist and not any(Path(folder).iterdir()):
            Path(folder).rmdir()


def _write_manifest(
    dist: Path, cache: Path, kept: set[str], ours: str, entries: list[dict[str, Any]]
) -> dict[str, Any]:
    digests = DigestCache(cache / "digests.json")
    files = {
        name: {"bytes": (dist / name).stat().st_size, "sha256": digests.sha256(dist / name)} for name in sorted(kept)
    }
    digests.save()
    stepwell_version = Path(ours).name.split("-")[1]
    manifest: dict[str, Any] = {
        "schema": 1,
        "stepwell": stepwell_version,
        "pyodide": PYODIDE_VERSION,
        "wheel": ours,
        "lock": LOCK,
        "models": entries,
        "versions": {"stepwell": stepwell_version, **{pin.name: pin.version for pin in (*NPM, *WHEELS)}},
        "files": files,
    }
    _add_text(dist, MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


class DigestCache:
    """sha256 of files that rarely change, remembered by path, size and modification time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._new: dict[str, list[Any]] = {}
        try:
            self._old: dict[str, list[Any]] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self._old = {}

    def sha256(self, path: Path) -> str:
        """The digest of ``path``, computed only if the file has changed."""
        stat = path.stat()
        key, seen = str(path.resolve()), [stat.st_size, stat.st_mtime_ns]
        old = self._old.get(key)
        digest: str = old[2] if old and old[:2] == seen else wheels.sha256(path)
        self._new[key] = [*seen, digest]
        return digest

    def save(self) -> None:
        """Write the digests for the next build."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self._old | self._new), encoding="utf-8")
