"""npm packages as pinned archives: fetched once with ``npm pack``, checked against the pin, unpacked by name."""

import base64
import hashlib
import json
import shutil
import tarfile
from pathlib import Path

from harness import SetupError
from harness.site.pins import NpmPin
from harness.site.process import Report, run_tool


def integrity(path: Path) -> str:
    """The SRI string (sha512) of the file ``path``, as npm writes it."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha512").digest()
    return "sha512-" + base64.b64encode(digest).decode()


def fetch(pin: NpmPin, cache: Path, report: Report) -> Path:
    """The archive of ``pin`` under ``cache``, downloaded when not there.  SetupError on a wrong digest."""
    archive = cache / f"{pin.name.lstrip('@').replace('/', '-')}-{pin.version}.tgz"
    if not archive.exists() or integrity(archive) != pin.integrity:
        report(f"fetching {pin.name} {pin.version} from npm")
        _download(pin, archive)
    found = integrity(archive)
    if found != pin.integrity:
        archive.unlink()
        raise SetupError(
            f"{pin.name}@{pin.version}: the archive's digest is {found}, the pin says {pin.integrity}. "
            "If the version in harness/site/pins.py was just changed, put the new digest there; "
            "else do not trust the registry."
        )
    return archive


def extract(archive: Path, members: dict[str, Path]) -> None:
    """Write the ``members`` of ``archive`` (name inside ``package/`` → target); SetupError for one that is missing."""
    with tarfile.open(archive) as tar:
        for name, target in members.items():
            try:
                source = tar.extractfile(f"package/{name}")
            except KeyError as error:
                raise SetupError(f"{archive.name} has no file {name}: the pin's file list is wrong.") from error
            if source is None:
                raise SetupError(f"{archive.name}: {name} is not a plain file.")
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, target.open("wb") as out:
                shutil.copyfileobj(source, out)


def _download(pin: NpmPin, archive: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise SetupError(
            f"npm is needed to fetch {pin.name}@{pin.version} and was not found. Install Node.js with npm "
            "(https://nodejs.org, `apt-get install nodejs npm` or `brew install node`) and run this again."
        )
    archive.parent.mkdir(parents=True, exist_ok=True)
    spec = f"{pin.name}@{pin.version}"
    text = run_tool(
        [npm, "pack", spec, "--json", "--pack-destination", str(archive.parent)],
        f"fetching {spec} from npm",
        "Run this again once `npm ping` answers.",
    )
    packed = json.loads(text)[0]["filename"].lstrip("@").replace("/", "-")
    (archive.parent / packed).replace(archive)
