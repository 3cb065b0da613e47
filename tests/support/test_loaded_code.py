"""Which of a user's files a run loaded, and how often the user's own code in other packages was called."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mock_scheduler.support.loaded_code import LoadedCode, compare_with_disk, find_changed_code, load_loaded_code
from mock_scheduler.support.versions import ROOT

_RECORD = """
import sys
from pathlib import Path
import flat_kernel, pack.inner, json, numpy
from mock_scheduler.support.loaded_code import save_loaded_code
save_loaded_code(Path(sys.argv[1]), global_rank=int(sys.argv[2]), calls=dict(called=3) if len(sys.argv) > 3 else None)
"""


def python(folder: Path, code: str, *arguments: str) -> str:
    """What a program in ``folder`` prints, with the modules beside it."""
    (folder / "program.py").write_text(textwrap.dedent(code))
    long_ago = time.time() - 1000
    for path in folder.rglob("*.py"):
        os.utime(path, (long_ago, long_ago))
    environ = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "program.py", *arguments], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: a flat module and a package."""
    (tmp_path / "flat_kernel.py").write_text("SCALE = 1.0\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "inner.py").write_text("import flat_kernel, linked\n")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "real.py").touch()
    (tmp_path / "linked.py").symlink_to("kept/real.py")
    (tmp_path / "unused.py").write_text("raise SystemExit\n")
    (tmp_path / "run").mkdir()
    return tmp_path


def test_files_are_named_from_the_folder_that_the_run_was_started_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alignment of a command in another folder looked for ``train.py`` in its own, and ran everything anew."""
    monkeypatch.setenv("MOCK_SCHEDULER_STARTED_IN", str(folder.parent))
    python(folder, _RECORD, "run", "0")
    loaded = load_loaded_code(folder / "run")
    assert loaded is not None
    assert f"{folder.name}/flat_kernel.py" in loaded.files
    monkeypatch.chdir(folder.parent)
    assert compare_with_disk(loaded) == {}


def test_every_loaded_file_of_the_user_is_recorded_and_nothing_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python(folder, _RECORD, "run", "0")
    loaded = load_loaded_code(folder / "run")
    assert loaded is not None
    assert sorted(loaded.files) == [
        "flat_kernel.py",
        "kept/real.py",
        "pack/__init__.py",
        "pack/inner.py",
        "program.py",
    ]
    assert loaded.changed_while_running == ()
    monkeypatch.chdir(folder)
    assert find_changed_code(folder / "run") == []


def test_an_edited_module_beside_the_entry_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python(folder, _RECORD, "run", "0")
    monkeypatch.chdir(folder)
    (folder / "flat_kernel.py").write_text("SCALE = 2.0\n")
    (folder / "pack" / "inner.py").unlink()
    (folder / "unused.py").write_text("1\n")
    assert find_changed_code(folder / "run") == [
        "flat_kernel.py, which it loaded, has changed",
        "pack/inner.py, which it loaded, is gone",
    ]


def test_a_run_of_unknown_code_is_not_taken_for_the_same(folder: Path) -> None:
    assert find_changed_code(folder / "run") == ["nobody knows which files it loaded"]
    (folder / "run" / "code").mkdir()
    (folder / "run" / "code" / "x.json").write_text('{"files": {"a": 1}, "calls": {}}')
    (reason,) = find_changed_code(folder / "run")
    assert reason.startswith("the record of the files that it loaded cannot be read: ")


@pytest.mark.parametrize("name", ["a" * 5_000, "d/" * 3_000, "a\0b", "/dev/zero", "."])
def test_a_record_of_what_is_no_file_ends_nothing(folder: Path, name: str) -> None:
    """A name longer than the system's ended an alignment, in place of having the run made anew."""
    (folder / "run" / "code").mkdir()
    (folder / "run" / "code" / "x.json").write_text(json.dumps({"files": {name: "0" * 64}, "calls": {}}))
    assert find_changed_code(folder / "run") == [f"{name}, which it loaded, cannot be read"]


def test_a_file_written_while_the_run_went_on_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = "import os; os.utime('flat_kernel.py')\n"
    python(folder, _RECORD.replace("save_loaded_code(Path", f"{edit}save_loaded_code(Path"), "run", "0")
    monkeypatch.chdir(folder)
    assert find_changed_code(folder / "run") == ["flat_kernel.py, which it loaded, was changed while it ran"]


@pytest.mark.parametrize("end", ["Path('flat_kernel.py').write_text('SCALE = 2.0')", "Path('flat_kernel.py').unlink()"])
def test_a_file_that_was_loaded_before_the_work_is_recorded_as_it_was_then(
    end: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = f"from mock_scheduler.support.loaded_code import note_loaded_code\nnote_loaded_code()\n{end}\n"
    python(folder, _RECORD.replace("save_loaded_code(Path", f"{work}save_loaded_code(Path"), "run", "0")
    loaded = load_loaded_code(folder / "run")
    assert loaded is not None
    assert loaded.files["flat_kernel.py"] == hashlib.sha256(b"SCALE = 1.0\n").hexdigest()
    assert loaded.changed_while_running == ("flat_kernel.py",)
    monkeypatch.chdir(folder)
    assert find_changed_code(folder / "run") == ["flat_kernel.py, which it loaded, was changed while it ran"]


def test_ranks_with_the_same_files_leave_one_record_and_counted_calls_add_up(folder: Path) -> None:
    python(folder, _RECORD, "run", "0")
    python(folder, _RECORD, "run", "1")
    assert len(list((folder / "run" / "code").iterdir())) == 1
    python(folder, _RECORD, "run", "0", "counted")
    python(folder, _RECORD, "run", "1", "counted")
    assert sorted(path.name for path in (folder / "run" / "code").glob("rank*")) == [
        "rank_00000.json",
        "rank_00001.json",
    ]
    loaded = load_loaded_code(folder / "run")
    assert isinstance(loaded, LoadedCode)
    assert loaded.calls == {"called": 6}


_CALLS = """
import functools, json
import torch
from torch.nn import functional, RMSNorm
from mock_scheduler.support.own_calls import count_own_calls

def gelu(x, real=functional.gelu):
    return real(x) * 2

def around(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)
    return inner

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 3

    @staticmethod
    def backward(context, gradient):
        return gradient * 3

class Torch:
    def __getattr__(self, name):
        return getattr(torch, name)

    def relu(self, x):
        return torch.relu(x)

functional.gelu = gelu
functional.silu = functools.partial(around(functional.silu))
RMSNorm.forward = around(RMSNorm.forward)
torch.nn.Tanh.forward = around(torch.nn.Tanh.forward)
torch.nn.init.Scale = Scale

@torch.no_grad()
def fill(tensor):
    return tensor.fill_(4)

torch.nn.init.ones_ = fill
torch.nn.parameter.torch = Torch()

own = count_own_calls()
x = torch.ones(2, requires_grad=True)
assert functional.gelu(x).tolist() == gelu(x).tolist()
functional.silu(x), functional.silu(x)
assert torch.nn.init.ones_(torch.zeros(1)).item() == 4
RMSNorm(2)(x)
torch.nn.init.Scale.apply(x).sum().backward()
assert x.grad.tolist() == [3.0, 3.0]
print(json.dumps(own.calls))
"""


def test_calls_of_functions_classes_and_objects_put_into_a_package_are_counted(folder: Path) -> None:
    """The patched Tanh is never called: a patch that did not act."""
    calls = json.loads(python(folder, _CALLS))
    assert calls.pop("torch.nn.parameter.torch") > 0  # stands for the module, and passes everything on
    assert calls == {
        "torch.nn.functional.gelu": 1,
        "torch.nn.functional.silu": 2,
        "torch.nn.init.Scale": 2,
        "torch.nn.init.ones_": 2,  # once by RMSNorm; the decorator around it is torch's
        "torch.nn.modules.activation.Tanh.forward": 0,
        "torch.nn.modules.normalization.RMSNorm.forward": 1,
    }


def test_a_program_without_own_code_counts_nothing(folder: Path) -> None:
    code = "import torch; from mock_scheduler.support.own_calls import count_own_calls; print(count_own_calls().calls)"
    assert python(folder, code) == "{}\n"
