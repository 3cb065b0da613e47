"""What is installed, and that setting up twice does the work once."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mock_scheduler import __version__

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), ROOT / "launch/slurm.sbatch", ROOT / ".ci/run"])


def pinned_requirements() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_versions_agree() -> None:
    assert f'version="{__version__}"' in (ROOT / "setup.py").read_text(encoding="utf-8")
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_pin_is_what_the_tests_run_on() -> None:
    pins = [pin for pin in pinned_requirements() if pin.marker is None or pin.marker.evaluate()]
    assert [str(pin) for pin in pins if version(pin.name) not in pin.specifier] == []


def test_every_pin_lies_in_its_range_and_every_range_has_a_pin() -> None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    quoted = re.findall(r"""^\s+(?:"([\w.-]+[^"]*)"|'([\w.-]+[^']*)'),$""", text, flags=re.MULTILINE)
    ranges = [Requirement(double or single) for double, single in quoted]
    pins = [(pin.name.lower(), str(pin.marker), next(iter(pin.specifier)).version) for pin in pinned_requirements()]
    assert len(ranges) > 15
    for wanted in ranges:
        found = [v for name, marker, v in pins if (name, marker) == (wanted.name.lower(), str(wanted.marker))]
        assert len(found) == 1, wanted
        assert found[0] in wanted.specifier, wanted


def test_apex_is_never_required() -> None:
    assert "apex" not in {pin.name for pin in pinned_requirements()}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.name))
def test_scripts_stop_at_errors_and_are_executable(script: Path) -> None:
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_setting_up_installs_once_and_again_when_requirements_change(tmp_path: Path) -> None:
    venv_bin = tmp_path / ".venv/bin"
    for folder in (tmp_path / "launch", venv_bin):
        folder.mkdir(parents=True)
    for name in ("launch/setup_venv.sh", "requirements.txt", "setup.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    calls = tmp_path / "calls"
    for name in ("python", "mock-scheduler"):
        (venv_bin / name).write_text(f'#!/usr/bin/env bash\necho "$@" >>"{calls}"\n', encoding="utf-8")
        (venv_bin / name).chmod(0o755)

    def installations() -> int:
        subprocess.run(["bash", str(tmp_path / "launch/setup_venv.sh")], check=True, cwd="/", capture_output=True)
        return len(re.findall("--no-deps --no-build-isolation -e", calls.read_text(encoding="utf-8")))

    assert [installations(), installations()] == [1, 1]
    with (tmp_path / "requirements.txt").open("a", encoding="utf-8") as requirements:
        requirements.write("einops==0.8.1\n")
    assert installations() == 2


def test_the_tests_with_other_programs_say_that_python_is_missing(tmp_path: Path) -> None:
    for name in ("python3.12", "python3"):
        (tmp_path / name).write_text("#!/usr/bin/env bash\nexit 1\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": "/no/such/python"}
    command = ["bash", str(ROOT / "launch/test.sh"), "--integrations"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        "Python 3.12 is needed for the tests with other programs, and none was found: not $PYTHON (/no/such/python), "
        "python3.12 or python3 on the path, nor pyenv's. Set PYTHON=/path/to/python3.12\n"
    )


def test_multi_node_names_what_is_missing() -> None:
    command = ["bash", str(ROOT / "launch/multi_node.sh"), "run", "--nnodes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith("usage: launch/multi_node.sh CONFIG_NAME --nnodes N")


def test_what_is_built_has_every_template_of_a_page(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    for folder in ("display", "report", "correction/report"):
        source, built = (parent / "mock_scheduler" / folder / "templates" for parent in (ROOT, tmp_path))
        names = sorted(path.name for path in source.iterdir())
        assert names
        assert sorted(path.name for path in built.iterdir()) == names


def test_the_source_distribution_has_all_c_files_and_their_header(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    (sources,) = tmp_path.glob("*/SOURCES.txt")
    listed = set(sources.read_text(encoding="utf-8").split())
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mock_scheduler").rglob("native.[ch]")}
    assert len(files) == 3
    assert files <= listed


@pytest.mark.all
@pytest.mark.timeout(1800)
def test_the_wheel_of_the_sdist_starts_a_folder_that_aligns_without_the_checkout(tmp_path: Path) -> None:
    """The environment has nothing of this checkout; it sees the installed dependencies by a path alone."""

    def run(*command: str | Path, cwd: Path = tmp_path) -> str:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    copy = tmp_path / "copy"  # building writes into the folder
    shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "output", "dumps", "*.egg-info"))
    run(sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", tmp_path, cwd=copy)
    shutil.rmtree(copy)
    (sdist,) = tmp_path.glob("*.tar.gz")
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(sys.executable, *pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, sdist)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "env")
    python, command = tmp_path / "env/bin/python", tmp_path / "env/bin/mock-scheduler"
    run(python, *pip, "install", "--no-deps", wheel)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # A folder in a .pth file is searched, but its own .pth files, such as this checkout's, are not read.
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n", encoding="utf-8")
    where = "import mock_scheduler, pipelines; print(mock_scheduler.__file__, pipelines.__file__)"
    assert all(name.startswith(f"{packages}/") for name in run(python, "-c", where).split())
    built = "import mock_scheduler.trace.sketch as s, pathlib; print(*pathlib.Path(s.__path__[0]).glob('native*.so'))"
    assert (shutil.which("cc") is None) == (run(python, "-c", built).strip() == "")

    assert "exp_name: quickstart" in run(command, "config", "quickstart")
    assert "cd start && mock-scheduler align align.yaml" in run(command, "new", "start")
    said = run(command, "align", "align.yaml", cwd=tmp_path / "start")
    assert "all of 3 candidates pass: 1 rounding, 1 identical (emulated), 1 identical" in said
    page = (tmp_path / "start/output/align/align.html").read_text(encoding="utf-8")
    assert "<h1>" in page
    assert "my-kernel" in page
    assert "the kernel was called" in (tmp_path / "start/output/align/my-kernel/run.log").read_text(encoding="utf-8")


@pytest.mark.all
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_c_files_are_built_without_headers_of_python(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(tmp_path), "--build-temp"]
    done = subprocess.run([*command, str(tmp_path / "temp")], check=True, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    functions = {"trace/sketch": ["sketch_rows_2"], "comparison/measure": ["sum_pair_1", "sum_changes_1"]}
    for folder, names in functions.items():
        (built,) = (tmp_path / "mock_scheduler" / folder).iterdir()
        assert all(hasattr(ctypes.CDLL(str(built)), name) for name in names)
        assert "Python.h" not in (ROOT / "mock_scheduler" / folder / "native.c").read_text(encoding="utf-8")
