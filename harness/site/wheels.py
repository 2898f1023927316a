"""The wheels that the page serves: ours, built from the tree, and the pinned ones from PyPI; and their lock file."""

import hashlib
import json
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from harness import SetupError
from harness.site.pins import PYODIDE_PYTHON, WheelPin
from harness.site.process import Report, run_tool

_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
_PIP_ADVICE = "Run `make setup` if pip itself is missing; otherwise try the command again."


def sha256(path: Path) -> str:
    """The digest of the file ``path``, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch(pin: WheelPin, cache: Path, report: Report) -> Path:
    """The wheel of ``pin`` under ``cache``; if missing, downloaded, or built without a compiler from pinned source."""
    # A wheel built here differs from machine to machine, so only its source has a digest to compare with.
    for wheel in cache.glob(f"{pin.name.replace('-', '_')}-{pin.version}-*.whl"):
        if pin.from_source or sha256(wheel) == pin.sha256:
            return wheel
    cache.mkdir(parents=True, exist_ok=True)
    report(f"fetching {pin.name} {pin.version} from PyPI")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        _pip_fetch(pin, Path(folder))
        (built,) = Path(folder).glob("*.whl")
        if not built.name.endswith("-none-any.whl"):
            raise SetupError(
                f"{built.name} holds compiled code and cannot run in Pyodide: a C compiler was used although CC points "
                "to a failing command. Build where no compiler is found."
            )
        return built.replace(cache / built.name)


def _pip_fetch(pin: WheelPin, folder: Path) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
    common = ["--no-deps", "--require-hashes", "-r", str(requirements)]
    what = f"fetching {pin.name}=={pin.version} from PyPI"
    if pin.from_source:
        no_compiler = {"CC": shutil.which("false") or "no-compiler", "CXX": shutil.which("false") or "no-compiler"}
        command = [*_PIP, "wheel", *common, "--no-binary", pin.name, "--no-cache-dir", "--wheel-dir", str(folder)]
        run_tool(command, what, _PIP_ADVICE, env=no_compiler)
    else:
        command = [*_PIP, "download", *common, "--python-version", PYODIDE_PYTHON, "--only-binary=:all:"]
        run_tool([*command, "--dest", str(folder)], what, _PIP_ADVICE)


def build(root: Path, cache: Path, report: Report) -> Path:
    """The wheel of the tree in ``root``.  Its build tag is a digest of the sources: new content, new file name."""
    digest = source_digest(root)
    folder = cache / digest
    if found := sorted(folder.glob("stepwell-*.whl")):
        return found[0]
    folder.mkdir(parents=True, exist_ok=True)
    report("building the stepwell wheel")
    with tempfile.TemporaryDirectory(dir=folder) as out:
        run_tool(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, str(root)],
            "building the stepwell wheel",
            "Run `make setup` to install the build tools.",
        )
        (wheel,) = Path(out).glob("*.whl")
        name, version, tags = wheel.name.split("-", 2)
        return wheel.replace(folder / f"{name}-{version}-0{digest}-{tags}")


def source_digest(root: Path) -> str:
    """Twelve hex digits over everything that goes into the wheel."""
    package = root / "pyodide_pkg" / "stepwell"
    sources = [p for p in package.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    digest = hashlib.sha256()
    for path in [*sorted(sources), *(root / name for name in ("pyproject.toml", "README.md", "LICENSE"))]:
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:12]


def metadata(wheel: Path) -> Message:
    """The METADATA of ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
        return BytesParser().parsebytes(archive.read(name))


def top_level(wheel: Path) -> list[str]:
    """The importable names of the pure ``wheel``."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = {n.split("/", 1)[0] for n in names if n.count("/") == 1 and n.endswith("/__init__.py")}
    modules = {n.removesuffix(".py") for n in names if "/" not in n and n.endswith(".py")}
    return sorted(packages | modules)


def requirements(wheel: Path) -> list[str]:
    """The canonical names of the packages that ``wheel`` needs in Pyodide (no extras)."""
    environment = {
        "sys_platform": "emscripten",
        "platform_system": "Emscripten",
        "os_name": "posix",
        "extra": "",
        "python_version": PYODIDE_PYTHON,
        "python_full_version": f"{PYODIDE_PYTHON}.0",
    }
    wanted = [Requirement(line) for line in metadata(wheel).get_all("Requires-Dist") or []]
    return sorted(canonicalize_name(r.name) for r in wanted if r.marker is None or r.marker.evaluate(environment))


def write_lock(upstream: Path, wheels: Iterable[Path], relative_to: str, target: Path) -> None:
    """Write a Pyodide lock file to ``target`` with exactly ``wheels``; ``relative_to`` is their folder seen from there.

    The interpreter's facts (``info``) are taken from the ``upstream`` lock file of the same Pyodide version.
    """
    from pyodide_lock import InfoSpec, PackageSpec, PyodideLockSpec

    info = json.loads(upstream.read_text(encoding="utf-8"))["info"]
    packages = {}
    for wheel in wheels:
        name, version, _, _ = parse_wheel_filename(wheel.name)
        packages[str(name)] = PackageSpec(
            name=str(name),
            version=str(version),
            file_name=wheel.name,
            install_dir="site",
            sha256=sha256(wheel),
            imports=top_level(wheel),
            depends=requirements(wheel),
        )
    missing = {need for spec in packages.values() for need in spec.depends} - packages.keys()
    if missing:
        raise SetupError(
            f"the site has no wheel for {', '.join(sorted(missing))}: add it to WHEELS in harness/site/pins.py."
        )
    lock = PyodideLockSpec(info=InfoSpec(**{"version": "0.0.0", **info}), packages=packages)
    lock.check_wheel_filenames()
    for spec in packages.values():
        spec.file_name = f"{relative_to}/{spec.file_name}"
    lock.to_json(target, indent=1)
