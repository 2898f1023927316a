"""The GitHub workflows follow GitHub's schema, and zizmor finds nothing above low in them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

WORKFLOWS_FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(WORKFLOWS_FOLDER.glob("*.yml"))


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    tool = Path(sys.executable).with_name(module)
    return subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=False)


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"ci", "browser", "nightly", "pages"}


def test_they_follow_the_published_schema() -> None:
    done = run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *map(str, WORKFLOWS))
    assert done.returncode == 0, done.stdout + done.stderr


def test_zizmor_finds_nothing_above_low() -> None:
    done = run("zizmor", "--offline", "--min-severity", "medium", *map(str, WORKFLOWS))
    assert done.returncode == 0, done.stdout + done.stderr


def test_zizmor_would_find_something(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yml"
    bad.write_text(
        "on: issue_comment\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n"
        "      - run: echo ${{ github.event.comment.body }}\n",
        encoding="utf-8",
    )
    assert run("zizmor", "--offline", "--min-severity", "medium", str(bad)).returncode != 0


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit(path: Path) -> None:
    used = [line.split("uses:")[1].split("#")[0].strip() for line in path.read_text().splitlines() if "uses:" in line]
    assert used
    assert [name for name in used if not name.startswith("./") and len(name.rpartition("@")[2]) != 40] == []


def test_every_folder_of_browser_tests_has_its_part() -> None:
    folders = {path.parent.name for path in (ROOT / "tests" / "browser").glob("*/test_*.py")}
    (parts,) = re.findall(r"part: \[(.*)\]", (WORKFLOWS_FOLDER / "browser.yml").read_text())
    assert set(parts.split(", ")) == folders


def test_the_site_is_published_after_all_else_has_passed() -> None:
    text = (WORKFLOWS_FOLDER / "ci.yml").read_text()
    jobs = re.findall(r"^  (\w+):$", text.partition("\njobs:\n")[2], re.MULTILINE)
    (needed,) = re.findall(r"needs: \[(.*)\]", text)
    assert [*needed.split(", "), "pages"] == jobs
    assert "  workflow_call:" in (WORKFLOWS_FOLDER / "pages.yml").read_text()
